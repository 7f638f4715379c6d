"""Pages and pictures of a run, comparisons, `tepo ablate` (`ablation/`), and `tepo audit` (`audit/`)."""
