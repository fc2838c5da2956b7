"""How weights move: advantages, loss, optimizer, trainer."""
