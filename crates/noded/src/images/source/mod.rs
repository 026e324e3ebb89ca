//! Where images come from.
//!
//! Every source ends in the same place: [`layer::unpack_blob`] (or, for a folder, a copy) makes one layer of the store,
//! verified against every digest that is known of it. OCI images are read through [`oci::Blobs`], of which a layout on
//! disk and an archive are two; a registry is a third.

mod archive;
mod config;
mod detect;
mod docker;
mod fit;
mod layer;
pub mod oci;
mod rootfs;
mod stream;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    layers::{LayerMeta, Layers, Pin},
    Error, ImageConfig, Result,
};

/// The kinds of files that can be imported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Told by looking at the file.
    #[default]
    Auto,
    /// An OCI image layout: a directory, or a tar of one.
    Oci,
    /// What `docker save` writes.
    DockerArchive,
    /// A tar of a root file system, plain or compressed.
    Tar,
    /// A root file system as a directory.
    Dir,
}

/// An image whose layers are in the store, held until a manifest names them.
#[derive(Debug)]
pub struct Imported {
    /// Bottom first.
    pub layers: Vec<(LayerMeta, Pin)>,
    pub config: ImageConfig,
    /// What the source itself calls the image.
    pub suggested_name: Option<String>,
}

/// Imports the image at `path`, which may end in `:TAG` where a file holds several.
pub fn import(path: &Path, format: Format, layers: &Layers) -> Result<Imported> {
    let (path, tag) = split_tag(path);
    let tag = tag.as_deref();
    let found = match format {
        Format::Auto => detect::detect(&path)?,
        format => format,
    };
    let metadata = std::fs::metadata(&path).map_err(|source| Error::Unreadable { path: path.clone(), source })?;
    let expect = |what: &str, fits: bool| {
        let kind = if metadata.is_dir() { "a directory" } else { "something else" };
        if fits {
            Ok(())
        } else {
            Err(Error::malformed(path.to_string_lossy(), what, kind))
        }
    };
    match found {
        Format::Oci if metadata.is_dir() => oci::import(&oci::Layout::new(&path), tag, layers),
        Format::Oci => {
            expect("a tar of an OCI layout", metadata.is_file())?;
            oci::import(&archive::Archive::open(&path, layers)?, tag, layers)
        }
        Format::DockerArchive => {
            expect("an archive made by `docker save`", metadata.is_file())?;
            docker::import(&archive::Archive::open(&path, layers)?, tag, layers)
        }
        Format::Tar => {
            expect("a tar of a root file system", metadata.is_file())?;
            rootfs::import_tar(&path, layers)
        }
        Format::Dir | Format::Auto => {
            expect("a directory with a root file system", metadata.is_dir())?;
            rootfs::import_dir(&path, layers)
        }
    }
}

/// `layout:tag`, unless there is a file of that very name.
fn split_tag(path: &Path) -> (PathBuf, Option<String>) {
    if !path.exists() {
        if let Some((file, tag)) = path.to_str().and_then(|text| text.rsplit_once(':')) {
            // The first colon of `file:name:tag` may be the right one.
            let (file, tag) = match file.split_once(':') {
                Some((shorter, rest)) if Path::new(shorter).exists() => (shorter, format!("{rest}:{tag}")),
                _ => (file, tag.to_owned()),
            };
            if Path::new(file).exists() {
                return (PathBuf::from(file), Some(tag));
            }
        }
    }
    (path.to_owned(), None)
}

/// Adds a layer on top. overlayfs takes each directory once, and of a layer that comes twice the upper one decides;
/// a layer that hides all below it leaves those out.
fn stack(store: &Layers, layers: &mut Vec<(LayerMeta, Pin)>, layer: (LayerMeta, Pin)) -> Result<()> {
    if layer.0.opaque_root {
        layers.clear();
    }
    let (meta, pin) = fit::fit(store, layers, layer)?;
    layers.retain(|(below, _)| below.digest != meta.digest);
    layers.push((meta, pin));
    Ok(())
}

/// This machine's architecture in OCI's words.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
