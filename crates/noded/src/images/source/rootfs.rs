//! A root file system alone, as a tar or a folder: one layer, and no configuration.

use std::{fs::File, path::Path};

use super::{
    layer::{self, Promise},
    Imported,
};
use crate::images::{
    layers::{Durability, Layers},
    tree,
    unpack::Limits,
    Error, ImageConfig, Result,
};

pub fn import_tar(path: &Path, layers: &Layers) -> Result<Imported> {
    let label = path.to_string_lossy();
    let layer = layer::obtain(layers, &label, Promise::default(), || {
        File::open(path).map_err(|source| Error::Unreadable { path: path.to_owned(), source })
    })?;
    if layer.0.entries == 0 {
        return Err(Error::malformed(label, "a tar of a root file system", "an empty archive"));
    }
    Ok(Imported { layers: vec![layer], config: ImageConfig::default(), suggested_name: None })
}

pub fn import_dir(path: &Path, layers: &Layers) -> Result<Imported> {
    let scratch = layers.scratch()?;
    let copy = scratch.path().join("fs");
    let copied = tree::copy(path, &copy, tree::Origin::Folder, Limits::for_path(scratch.path()).bytes)?;
    let mut meta = tree::digest(&tree::open_root(&copy)?, &copy)?;
    if meta.entries < 2 {
        return Err(Error::malformed(
            path.to_string_lossy(),
            "a directory with a root file system",
            "an empty directory",
        ));
    }
    meta.warnings = copied.warnings;
    let layer = layers.take_in(scratch, meta, Durability::Synced)?;
    Ok(Imported { layers: vec![layer], config: ImageConfig::default(), suggested_name: None })
}
