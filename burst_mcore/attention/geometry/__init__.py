"""Which query rows attend to which key rows, on which rank, and who needs whose rows."""
