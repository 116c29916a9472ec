"""Block formats as pure numpy functions: geometry, encode, decode, pack. No file is read or written here."""
