"""Loss functions that exist already, as the kit takes them: this project's rows, and public ones of other packages."""
