const apply = () => { document.documentElement.dataset.theme = document.querySelector("[name=theme]:checked").value; };
document.querySelectorAll("[name=theme]").forEach(choice => choice.addEventListener("change", apply));
apply();
