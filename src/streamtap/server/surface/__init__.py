"""What HTTP looks like from outside: one shape of error, an id on every answer, bodies with a limit."""
