"""What every command shares: errors, files that are never half written, folders with one owner."""
