//! The image store: content-addressed layers, imports, the `host` image, commits.
//!
//! # Layout
//! - `store`: the index (manifests, names, what is in use) and every operation on whole images.
//! - `layers`: layer directories: staging, publication by rename, single flight, pins, removal.
//! - `source`: where layers come from: OCI layout (a registry is read as one), docker archive, rootfs tar, folder.
//! - `registry`: images from registries: names, mirrors, logins, downloads.
//! - `gc`: which images go when the disk is full.
//! - `unpack`: a layer's tar into a directory tree; `tar`: the reader; `confined`: creation below a root, never beyond.
//! - `tree`: walks over trees on disk: digest, owner shift, copy.
//! - `host`: the image made of this machine's own `/usr`.
//! - `commit`: a sandbox's changes become a layer.
//! - `routes`: the control API's calls on images.
//!
//! On disk, under `DIR/images` (mode 0700: a layer may hold set-uid programs, which no user of the host may reach):
//! ```text
//! layers/<hex of the digest>/{fs,layer.json}   layer trees, owned by ids 0..65535 as the image says
//! host/<hex>/fs                                skeletons of the host image
//! manifests/<hex of the image id>.json         one image
//! refs.json                                    names -> image ids
//! staging/                                     half-done work, emptied at start
//! ```
//! Everything enters by a rename out of `staging`, so a SIGKILL at any point leaves the old state or the new one.

mod commit;
mod error;
mod gc;
mod host;
mod layers;
mod manifest;
mod names;
mod registry;
mod routes;
mod source;
mod store;
mod tar;
mod tree;
mod unpack;

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use error::{Error, Result};
pub use gc::{Marks, Request as Collection};
pub use routes::handle;
pub use source::Format;
pub use store::{Options, Store};

/// Part of an OCI image configuration that a sandbox obeys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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

/// What the API says about an image.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ImageInfo {
    pub id: String,
    pub names: Vec<String>,
    /// Digests of all layers, bottom first, tree after tree.
    pub layers: Vec<String>,
    pub config: ImageConfig,
    /// Bytes of file content in its layers, shared ones included; 0 for what lies in the host's own `/usr`.
    pub size_bytes: u64,
    pub created_at: f64,
    pub last_used_at: f64,
    /// How many holders (sandboxes, commits) it has now.
    pub in_use: usize,
    /// What was left out when its layers were unpacked, such as device nodes.
    pub warnings: Vec<String>,
}

/// How a commit names and configures the new image.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct CommitOptions {
    /// Without a name the image is ephemeral: removed by a DELETE, or by [`Store::sweep`] once nothing uses it.
    pub name: Option<String>,
    /// Over the base's configuration.
    pub config: ConfigChange,
}

/// What a commit changes in the configuration; absent fields stay as the base has them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ConfigChange {
    /// Added to the base's environment, variable by variable.
    pub env: BTreeMap<String, String>,
    pub workdir: Option<String>,
    pub user: Option<String>,
    /// These two replace the base's, also by nothing.
    pub entrypoint: Option<Vec<String>>,
    pub cmd: Option<Vec<String>>,
    /// Added to the base's.
    pub volumes: Vec<String>,
    pub labels: BTreeMap<String, String>,
}
