"""``lightnet data latents``: images to the means and log-variances that a VAE encodes them to, as shards.

What is stored is the distribution, not a sample of it, so that training draws the sample as a function of its seed.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data import autoencoders, manifest, pictures, sample_shards
from lightnet_data.errors import DataError
from lightnet_data.images import check_output
from lightnet_data.output import OutputFolder, flush, replace
from lightnet_data.shards import sha256

EXTENSION = "npy"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LatentOptions:
    """Options of a preparation of latents.

    ``size``: images are cropped to so many pixels square, as DiT does. ``flip``: the mirrored image's latent is stored, too
    (mirroring a latent is not the latent of the mirrored image). ``precision``: of the encoder, fp32, bf16 or fp16; stored
    are 16 bits (fp16) in any case. ``batch``: images encoded at a time. ``device``: "auto", "cpu", "cuda", "cuda:1" ...
    """

    size: int = 256
    flip: bool = True
    precision: str = "fp32"
    batch: int = 32
    device: str = "auto"


def prepare_latents(
    source: str | Path,
    output: str | Path,
    vae: str | Path,
    options: LatentOptions | None = None,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], Any] = lambda count: None,
    counted: Callable[[int], Any] = lambda count: None,
) -> dict[str, Any]:
    """Encode every image of a folder of image shards; the manifest of the finished folder.

    A sample's data member is fp16 [1 or 2, 2, C, h, w]: the image and with ``flip`` the mirrored one; mean and
    log-variance. Shards correspond to those of ``source``. One that is done is not done again after a stop.

    Args:
        source: folder made by ``lightnet data images``.
        output: folder to make.
        vae: folder of a diffusers AutoencoderKL (config.json and weights).
        options: see ``LatentOptions``.
        note: gets lines for the user.
        progress: called with numbers of images done; ``counted`` once before with their total.

    Raises:
        DataError: not such folders, a size that the VAE cannot take, latents beyond fp16, or ``output`` is there.
    """
    options, output = options or LatentOptions(), Path(output)
    written = sample_shards.load(source, "images")
    sample_shards.require_webdataset()
    check_output(output)
    encoder = Encoder(vae, options)
    counted(written["samples"])
    request = {**asdict(options), "vae": encoder.fingerprint}
    for name in ("batch", "device"):  # of no meaning to what is stored
        del request[name]
    target = OutputFolder(output, note, resume=True)
    with target as folder:
        (folder / "parts").mkdir(exist_ok=True)
        splits, files, moments = {}, {}, []
        for split, entry in written["splits"].items():
            store = sample_shards.SampleStore(source, split, "images")
            done = [
                _shard(folder / "parts", store, split, number, encoder, request, progress)
                for number in range(len(entry["shards"]))
            ]
            index = np.concatenate([np.array(part["index"], dtype=np.int64) for part in done])
            name = sample_shards.save_index(folder / "out", split, index)
            files[name] = _entry(folder / "out" / name)
            moments += [part["moments"] for part in done]
            splits[split] = {
                "samples": len(index),
                "bytes": int(index[:, 2].sum()),
                "class_counts": entry["class_counts"],
                "index": name,
                "shards": [part["shard"] for part in done],
            }
        shutil.copyfile(Path(source, sample_shards.CLASSES), folder / "out" / sample_shards.CLASSES)
        files[sample_shards.CLASSES] = _entry(folder / "out" / sample_shards.CLASSES)
        result = {
            "format": sample_shards.FORMAT,
            "format_version": sample_shards.FORMAT_VERSION,
            "kind": "latents",
            "samples": written["samples"],
            "classes": written["classes"],
            "splits": splits,
            "latents": {**encoder.facts(), **_scaled(moments, encoder)},
            "files": files,
            "request": {**request, "source": str(source), "source_sha256": sha256(Path(source, manifest.FILE_NAME))},
        }
        manifest.save(folder / "out", result)
        for split in splits.values():  # only now: until here a stop leaves every finished shard where it is found again
            for shard in split["shards"]:
                (folder / "parts" / shard["file"]).rename(folder / "out" / shard["file"])
        target.finish()
    return result


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


class Encoder:
    """A VAE's encoder as a function of images.

    Attributes:
        fingerprint: SHA-256 of its configuration and weights.
        shape: [1 or 2, 2, C, h, w] of what is stored of an image.
    """

    def __init__(self, path: str | Path, options: LatentOptions) -> None:
        if options.precision not in PRECISIONS:
            raise DataError(f"--precision {options.precision}: one of {', '.join(PRECISIONS)}")
        if options.batch < 1:
            raise DataError(f"--batch {options.batch}: must be at least 1")
        self.options, self.device = options, device_of(options.device)
        self._vae = autoencoders.load(path, PRECISIONS[options.precision]).to(self.device)
        facts = autoencoders.facts(self._vae)
        if options.size < facts.factor or options.size % facts.factor:
            nearest = max(facts.factor, round(options.size / facts.factor) * facts.factor)
            raise DataError(f"--size {options.size}: this VAE takes multiples of {facts.factor}; nearest {nearest}")
        side = options.size // facts.factor
        self.shape = [1 + options.flip, 2, facts.channels, side, side]
        self.scaling_factor, self.shift_factor = facts.scaling_factor, facts.shift_factor
        self.fingerprint = autoencoders.fingerprint(path)

    def facts(self) -> dict[str, Any]:
        """What training must know."""
        return {
            "shape": self.shape,
            "dtype": "float16",
            "axes": ["mirrored", "mean and log-variance", "channel", "row", "column"],
            "size": self.options.size,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
        }

    @torch.inference_mode()
    def __call__(self, images: list[Any]) -> NDArray[np.float16]:
        """Latents of PIL images, fp16 [B, 1 or 2, 2, C, h, w]."""
        pixels = np.stack([np.asarray(pictures.center_crop(image, self.options.size)) for image in images])
        values = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1
        found = []
        for mirrored in (False, True)[: 1 + self.options.flip]:
            given = values.flip(3) if mirrored else values
            latent = self._vae.encode(given.to(PRECISIONS[self.options.precision])).latent_dist
            found.append(torch.stack([latent.mean, latent.logvar], 1))
        stored: NDArray[np.float16] = torch.stack(found, 1).to(torch.float16).cpu().numpy()
        return stored


def device_of(name: str) -> torch.device:
    """The device of ``--device``.

    Raises:
        DataError: it is not here.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"--device {name}: not here ({str(error).splitlines()[0]}); use auto or cpu") from None
    return device


def _shard(
    folder: Path,
    store: sample_shards.SampleStore,
    split: str,
    number: int,
    encoder: Encoder,
    request: dict[str, Any],
    progress: Callable[[int], Any],
) -> dict[str, Any]:
    """Write one shard, unless it is there from the same request and images; its report."""
    source = store.shards[number]
    rows = np.flatnonzero(store.index[:, 0] == number)
    stamp = hashlib.sha256(json.dumps([request, source["sha256"]], sort_keys=True).encode()).hexdigest()
    tar, report = folder / f"{split}-{number:06d}.tar", folder / f"{split}-{number:06d}.json"
    if report.is_file() and tar.is_file():
        part: dict[str, Any] = json.loads(report.read_text("utf-8"))
        if part["stamp"] == stamp and tar.stat().st_size == part["shard"]["bytes"]:
            progress(len(rows))
            return part
    report.unlink(missing_ok=True)
    moments = np.zeros(3)
    with sample_shards.SampleWriter(folder, split, 2**62, number) as writer:
        for chosen, latents in _encoded(store, rows, encoder):
            for row, latent in zip(chosen, latents, strict=True):
                if not np.isfinite(latent).all():
                    where = f"{store.where(row)}: sample {row}"
                    raise DataError(
                        f"{where}: its latent is beyond fp16 or not finite; use --precision fp32 or another VAE"
                    )
                buffer = io.BytesIO()
                np.save(buffer, latent)
                writer.add(EXTENSION, buffer.getvalue(), int(store.labels[row]), {"source": row}, row)
            mean, logvar = latents.astype(np.float64).transpose(2, 0, 1, 3, 4, 5)
            moments += [mean.size, mean.sum(), (mean**2 + np.exp(logvar)).sum()]
            progress(len(chosen))
    part = {
        "stamp": stamp,
        "shard": writer.shards[0],
        "index": writer.index().tolist(),
        "moments": moments.tolist(),
    }
    flush(tar)
    replace(report, json.dumps(part).encode())
    return part


def _encoded(
    store: sample_shards.SampleStore, rows: NDArray[np.int64], encoder: Encoder
) -> Iterator[tuple[list[int], NDArray[np.float16]]]:
    for start in range(0, len(rows), encoder.options.batch):
        chosen = [int(row) for row in rows[start : start + encoder.options.batch]]
        images = []
        for row in chosen:
            try:
                images.append(pictures.decode(store.read(row)[0]))
            except pictures.BadImage as error:
                raise DataError(f"{store.where(row)}: sample {row} {error}; run lightnet data verify") from None
        yield chosen, encoder(images)


def _scaled(moments: list[list[float]], encoder: Encoder) -> dict[str, float]:
    """Mean and standard deviation of a latent as training sees it: drawn, shifted and scaled."""
    count, total, squares = np.sum(moments, axis=0)
    mean = total / count
    deviation = float(np.sqrt(max(squares / count - mean**2, 0.0)))
    return {
        "scaled_mean": (mean - encoder.shift_factor) * encoder.scaling_factor,
        "scaled_std": deviation * encoder.scaling_factor,
    }
