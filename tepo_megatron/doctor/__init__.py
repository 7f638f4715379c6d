"""`tepo doctor`: whether a run can work, before it costs anything. `tepo plan` (`plan/`): how much memory it takes."""
