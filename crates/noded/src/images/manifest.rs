//! One image on disk: its trees as lists of layers, and its configuration.

use std::{
    collections::HashMap,
    fmt, fs,
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    gc::Origin,
    host,
    layers::{self, to_json, Durability, Scratch},
    store::now,
    Error, ImageConfig, Result,
};

const VERSION: u32 = 1;

/// Where one layer lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LayerRef {
    /// `sha256:…`, a layer of the store.
    Stored(String),
    /// `host:<hex>`, a skeleton of the host image.
    Skeleton(String),
    /// `host:/usr`, the host's own.
    HostUsr,
}

impl LayerRef {
    /// The digest of a layer of the store.
    pub fn digest(&self) -> Option<&str> {
        match self {
            Self::Stored(digest) => Some(digest),
            Self::Skeleton(_) | Self::HostUsr => None,
        }
    }
}

impl fmt::Display for LayerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(digest) => f.write_str(digest),
            Self::Skeleton(hex) => write!(f, "{}{hex}", host::ID_PREFIX),
            Self::HostUsr => write!(f, "{}/usr", host::ID_PREFIX),
        }
    }
}

impl From<LayerRef> for String {
    fn from(layer: LayerRef) -> Self {
        layer.to_string()
    }
}

impl TryFrom<String> for LayerRef {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        if layers::hex_of(&text).is_some() {
            return Ok(Self::Stored(text));
        }
        match host::hex_of(&text) {
            Some(hex) => Ok(Self::Skeleton(hex.to_owned())),
            None if text == "host:/usr" => Ok(Self::HostUsr),
            None => Err(format!("{text:?} is no layer")),
        }
    }
}

/// One tree of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    pub target: PathBuf,
    /// Bottom first.
    pub layers: Vec<LayerRef>,
}

/// An image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    /// `sha256:` over trees and configuration.
    pub id: String,
    pub trees: Vec<TreeRecord>,
    pub config: ImageConfig,
    pub size_bytes: u64,
    pub created_at: f64,
    #[serde(default)]
    pub warnings: Vec<String>,
    #[serde(default)]
    pub origin: Origin,
}

impl Manifest {
    pub fn new(
        origin: Origin,
        trees: Vec<TreeRecord>,
        config: ImageConfig,
        size_bytes: u64,
        warnings: Vec<String>,
    ) -> Self {
        let digest = Sha256::digest(to_json(&(VERSION, &trees, &config)));
        let id = format!("{}{}", layers::DIGEST_PREFIX, layers::hex(&digest));
        Self { version: VERSION, id, trees, config, size_bytes, created_at: now(), warnings, origin }
    }

    pub fn layers(&self) -> impl Iterator<Item = &LayerRef> {
        self.trees.iter().flat_map(|tree| &tree.layers)
    }

    /// All images under `dir`. A file that does not parse is an error: guessing could lose somebody's image.
    pub fn load_all(dir: &Path) -> Result<HashMap<String, Self>> {
        let mut found = HashMap::new();
        for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
            let path = entry.map_err(Error::io("list", dir))?.path();
            let text = fs::read(&path).map_err(Error::io("read", &path))?;
            let manifest: Self = serde_json::from_slice(&text)
                .map_err(|error| Error::Damaged { path: path.clone(), reason: error.to_string() })?;
            if manifest.version != VERSION {
                let reason = format!("it is of version {}, this program knows {VERSION}", manifest.version);
                return Err(Error::Damaged { path, reason });
            }
            found.insert(manifest.id.clone(), manifest);
        }
        Ok(found)
    }

    pub fn save(&self, dir: &Path, staging: &Path) -> Result<()> {
        write_whole(&file(dir, &self.id), staging, &to_json(self), Durability::Synced)
    }

    pub fn delete(dir: &Path, id: &str) -> Result<()> {
        let path = file(dir, id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
            _ => Ok(()),
        }
    }
}

fn file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{}.json", id.strip_prefix(layers::DIGEST_PREFIX).unwrap_or(id)))
}

/// Writes a file so that it has the old content or the new, after a power failure too if it is to be synced.
pub fn write_whole(path: &Path, staging: &Path, content: &[u8], durability: Durability) -> Result<()> {
    let scratch = Scratch::new(staging)?;
    let temporary = scratch.path().join("file");
    let mut file = fs::File::create(&temporary).map_err(Error::io("make", &temporary))?;
    file.write_all(content).map_err(Error::io("write", &temporary))?;
    if durability == Durability::Synced {
        file.sync_all().map_err(Error::io("sync", &temporary))?;
    }
    fs::rename(&temporary, path).map_err(Error::io("rename into place", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_depends_on_content_only() {
        let tree = |digit: char| {
            let digest = format!("sha256:{}", digit.to_string().repeat(64));
            vec![TreeRecord { target: "/".into(), layers: vec![LayerRef::Stored(digest)] }]
        };
        let one = Manifest::new(Origin::default(), tree('a'), ImageConfig::default(), 1, vec![]);
        let same = Manifest::new(Origin::default(), tree('a'), ImageConfig::default(), 2, vec!["w".into()]);
        let other = Manifest::new(Origin::default(), tree('b'), ImageConfig::default(), 1, vec![]);
        assert_eq!(one.id, same.id);
        assert_ne!(one.id, other.id);
    }

    #[test]
    fn layer_references_survive_json_and_refuse_paths() {
        for layer in [
            LayerRef::Stored(format!("sha256:{}", "0".repeat(64))),
            LayerRef::Skeleton("ab12".into()),
            LayerRef::HostUsr,
        ] {
            let back: LayerRef = serde_json::from_slice(&to_json(&layer)).unwrap();
            assert_eq!(back, layer);
        }
        for bad in ["sha256:../../etc", "host:../x", "host:", "/etc"] {
            assert!(LayerRef::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
