"""The modelled time of a compiled step: its kernels, its schedule, its collectives."""
