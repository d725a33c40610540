"""One image: what is wrong with it, its pixels as RGB, resized and cropped. Needs pillow."""

import io
import warnings
from dataclasses import dataclass
from typing import Any

from lightnet_data.errors import DataError

EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "GIF": "gif", "PPM": "ppm", "TIFF": "tif"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
_CHANNELS = {
    "L": "1 channel",
    "1": "1 channel",
    "P": "a palette",
    "LA": "2 channels",
    "RGBA": "4 channels",
    "CMYK": "4 channels",
}
JPEG_QUALITY = 95


class BadImage(ValueError):
    """``kind``: "corrupt", "channels", "frames" or "tiny"; the message says more."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Picture:
    """A checked image: bytes to store, their usual extension, and what it is."""

    data: bytes
    extension: str
    width: int
    height: int
    mode: str


def pillow() -> Any:
    """``PIL.Image``, or a DataError that says how to have it."""
    try:
        from PIL import Image, ImageFile
    except ImportError:
        raise DataError("images need webdataset and pillow: pip install 'lightnet-llm[vision]'") from None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    return Image


def _open(data: bytes) -> Any:
    """A decoded image; BadImage "corrupt" where it is none."""
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            opened = image.open(io.BytesIO(data))
            opened.load()
    except (image.DecompressionBombError, image.DecompressionBombWarning) as error:
        raise BadImage("corrupt", f"too many pixels ({error})") from None
    except Exception as error:  # pillow's readers raise OSError, SyntaxError, ValueError, struct.error and more
        said = str(error).replace(repr(error.args), "").split(" <_io")[0]  # pillow names the buffer
        raise BadImage("corrupt", f"cannot be decoded ({said[:90]})") from None
    return opened


def check(data: bytes, convert: bool = False, min_size: int = 16, resize: int | None = None) -> Picture:
    """Look at an image, every pixel of it decoded.

    Args:
        data: of the file.
        convert: take images that are not RGB of 8 bits; ``decode`` makes RGB of them.
        min_size: least pixels of the shorter side.
        resize: shrink the shorter side to so many pixels and encode anew (JPEG stays JPEG, all else becomes PNG); None and
            smaller images: the bytes as they are.

    Raises:
        BadImage: it is bad.
    """
    opened = _open(data)
    width, height = opened.size
    if min(width, height) < min_size:
        raise BadImage("tiny", f"{width} x {height} pixels, smaller than {min_size}")
    if getattr(opened, "n_frames", 1) > 1:
        raise BadImage("frames", f"{opened.n_frames} frames, not one image")
    if opened.mode != "RGB" and not convert:
        raise BadImage("channels", f"{_CHANNELS.get(opened.mode, 'other channels')} (mode {opened.mode}), not RGB")
    extension = EXTENSIONS.get(opened.format)
    if extension is None:
        raise BadImage("corrupt", f"format {opened.format} is none of {', '.join(EXTENSIONS)}")
    mode = opened.mode
    if resize is not None and min(width, height) > resize:
        small = shorter_side(rgb(opened), resize)
        width, height = small.size
        buffer = io.BytesIO()
        if extension == "jpg":
            small.save(buffer, "JPEG", quality=JPEG_QUALITY)
        else:
            extension = "png"
            small.save(buffer, "PNG")
        data, mode = buffer.getvalue(), "RGB"
    return Picture(data, extension, width, height, mode)


def decode(data: bytes) -> Any:
    """Pixels of an image as RGB (PIL), what is transparent over white.

    Raises:
        BadImage: it cannot be decoded.
    """
    return rgb(_open(data))


def rgb(opened: Any) -> Any:
    """A PIL image as RGB, what is transparent over white, 16-bit grey scaled to 8."""
    image = pillow()
    if opened.mode == "RGB":
        return opened
    if opened.mode.startswith("I"):
        return opened.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
        over = opened.convert("RGBA")
        return image.alpha_composite(image.new("RGBA", over.size, "white"), over).convert("RGB")
    return opened.convert("RGB")


def shorter_side(opened: Any, size: int) -> Any:
    """Resized so that the shorter side has ``size`` pixels (bicubic, antialiased)."""
    width, height = opened.size
    scale = size / min(width, height)
    target = max(size, round(width * scale)), max(size, round(height * scale))
    return opened.resize(target, pillow().Resampling.BICUBIC)


def center_crop(opened: Any, size: int) -> Any:
    """The middle size x size pixels after ``shorter_side``; halved by boxes first, as ADM and DiT do."""
    image = pillow()
    while min(opened.size) >= 2 * size:
        opened = opened.resize((opened.width // 2, opened.height // 2), image.Resampling.BOX)
    opened = shorter_side(opened, size)
    left, top = (opened.width - size) // 2, (opened.height - size) // 2
    return opened.crop((left, top, left + size, top + size))
