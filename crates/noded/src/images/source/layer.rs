//! One blob becomes one layer of the store.

use std::{io::Read, path::Path};

use super::stream::{drain, Decompressed, Hashing};
use crate::images::{
    layers::{hex_of, LayerMeta, Layers, Pin},
    tar::{Tar, TarError},
    unpack::{self, Limits},
    Error, Result,
};

/// What is known of a blob before it is read.
#[derive(Debug, Default, Clone, Copy)]
pub struct Promise<'a> {
    /// Digest of the blob as it is.
    pub blob: Option<&'a str>,
    /// Digest of the tar in it.
    pub diff_id: Option<&'a str>,
}

/// The layer with this diff id, unpacked from what `open` gives unless the store has it.
pub fn obtain<R: Read>(
    layers: &Layers,
    label: &str,
    promise: Promise,
    open: impl FnOnce() -> Result<R>,
) -> Result<(LayerMeta, Pin)> {
    match promise.diff_id {
        Some(diff_id) => {
            if hex_of(diff_id).is_none() {
                return Err(Error::malformed(label, "a sha256 digest as the layer's id", format!("{diff_id:?}")));
            }
            layers.obtain(diff_id, |root| unpack_blob(label, promise, open()?, root))
        }
        None => {
            let scratch = layers.scratch()?;
            let meta = unpack_blob(label, promise, open()?, &scratch.path().join("fs"))?;
            layers.take_in(scratch, meta, crate::images::layers::Durability::Synced)
        }
    }
}

/// Unpacks into `root`, checking what was promised.
fn unpack_blob(label: &str, promise: Promise, blob: impl Read, root: &Path) -> Result<LayerMeta> {
    let limits = Limits::for_path(root.parent().unwrap_or(root));
    let decompressed = Decompressed::new(Hashing::new(blob), label)?;
    let mut tar = Tar::new(Hashing::new(decompressed));
    let unpacked = unpack::unpack(label, &mut tar, root, limits)?;
    let mut rest = tar.into_inner();
    let unreadable = |error| TarError::Io(error).of(label);
    // The digest is over all of it, padding after the archive included.
    if !drain(&mut rest, limits.bytes).map_err(unreadable)? {
        return Err(Error::TooLarge { file: label.to_owned(), what: "too much data after the archive".to_owned() });
    }
    if !unpacked.complete && promise.diff_id.is_none() {
        return Err(Error::malformed(label, "a whole tar archive", "no end marker: it was cut off, or never finished"));
    }
    let (diff_id, decompressed) = rest.finish();
    let mut raw = decompressed.into_inner();
    drain(&mut raw, limits.bytes).map_err(unreadable)?;
    let (blob_digest, _) = raw.finish();
    for (promised, found) in [(promise.blob, blob_digest), (promise.diff_id, diff_id.clone())] {
        if let Some(expected) = promised.filter(|expected| *expected != found) {
            return Err(Error::DigestMismatch { file: label.to_owned(), expected: expected.to_owned(), found });
        }
    }
    Ok(LayerMeta {
        digest: diff_id,
        size_bytes: unpacked.size_bytes,
        entries: unpacked.entries,
        opaque_root: unpacked.opaque_root,
        hides: unpacked.hides,
        implicit: unpacked.implicit,
        warnings: unpacked.warnings,
    })
}
