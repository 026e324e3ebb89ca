//! The image store. (Contract for the rest of noded; see ARCHITECTURE.md.)

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

/// Part of an OCI image configuration that a sandbox obeys.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    pub env: BTreeMap<String, String>,
    pub workdir: Option<String>,
    pub user: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub volumes: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// One overlay of a sandbox: where it is mounted, and its lower directories, topmost first. The directories are owned
/// by ids 0..65535 on disk; each sandbox sees them through an id-mapped mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// `/` or, for the host image, also `/usr`.
    pub target: PathBuf,
    pub lower: Vec<PathBuf>,
}

/// An image as the create path needs it. While an `Arc` of it lives, the store does not remove its layers.
#[derive(Debug)]
pub struct ResolvedImage {
    /// `sha256:…` over layers and configuration; `host:…` for the host image.
    pub id: String,
    pub trees: Vec<Tree>,
    pub config: ImageConfig,
}
