"""What commands, training, serving and the comparison share; torch at most."""
