"""Models of other projects, unedited: a measurement, a plan and a training step of each. Each needs a clone of the project."""
