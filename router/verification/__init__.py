"""``qarr verify``: whether an engine answers as well as another one, from the same model to the speed."""
