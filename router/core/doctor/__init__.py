"""What may be wrong with a running fleet: `facts` of it, pure checks of them, `findings` and what each means."""
