"""What age the samples may have, under which correction: reward against lag."""
