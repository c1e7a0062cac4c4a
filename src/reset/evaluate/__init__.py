"""Score a model on a task: problems, engines, graders, runs that survive a kill, reports."""
