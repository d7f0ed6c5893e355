"""What is done about damage: the blocks and requests that it reaches, the limits, the account."""
