"""One suite that every driver passes."""
