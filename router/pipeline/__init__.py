"""The steps that every served request goes through."""
