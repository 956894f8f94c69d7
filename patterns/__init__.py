"""One file per recognised structure: a value in, a typed match or a reason out. Never changes IR."""
