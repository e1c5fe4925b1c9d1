"""What a gateway knows of the models that it serves, without loading one."""
