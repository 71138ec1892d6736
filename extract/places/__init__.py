"""Places: one problem of all programs that differ in how some of their places are computed."""
