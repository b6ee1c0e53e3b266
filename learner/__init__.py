"""The learner role: select, batch, loss, optimise, publish, commit."""
