"""Proof from the files alone: who reads which bytes, and what each runtime makes of them."""
