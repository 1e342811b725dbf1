"""Number formats by name, and what one element costs in memory. The only place a format's size is written."""
from onchip.errors import InputError

# bytes an element
BYTES: dict[str, int] = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}

ALIASES: dict[str, str] = {
    "fp64": "float64", "f64": "float64", "double": "float64",
    "fp32": "float32", "f32": "float32", "float": "float32",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3", "fp8": "float8_e4m3", "float8_e4m3fn": "float8_e4m3",
    "e5m2": "float8_e5m2",
}


def parse_dtype(name: str, argument: str = "dtype") -> str:
    """The canonical name of a format: ``'bf16'`` → ``'bfloat16'``. Raises `InputError` for an unknown one."""
    key = name.lower().removeprefix("torch.")
    key = ALIASES.get(key, key)
    if key not in BYTES:
        raise InputError(f"{argument}: got {name!r}, accepted: {', '.join(BYTES)} or a short form ({', '.join(ALIASES)})")
    return key
