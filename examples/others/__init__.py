"""Models of other projects, unedited: a measure, a plan and a training step of each. Each needs a clone of the project."""
