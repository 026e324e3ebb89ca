//! Where images come from.

use std::path::Path;

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
    pub warnings: Vec<String>,
}

pub fn import(path: &Path, _format: Format, _layers: &Layers) -> Result<Imported> {
    Err(Error::InvalidArgument { reason: format!("cannot import {} yet", path.display()) })
}
