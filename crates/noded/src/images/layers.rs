//! Layer directories: how they come into being, are shared, held and removed.
//!
//! A layer is made in `staging` and enters `layers` by one rename, complete or not at all. Two imports of the same layer
//! make it once: the second waits for the first. A [`Pin`] keeps a layer from being removed between the moment somebody
//! decides to use it and the moment a manifest says so.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
};

use serde::{Deserialize, Serialize};

use super::{tree, Error, Result};

/// What every digest begins with.
pub const DIGEST_PREFIX: &str = "sha256:";

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// The 64 hexadecimal digits of a `sha256:` digest, if it is one. Nothing else may become part of a path.
pub fn hex_of(digest: &str) -> Option<&str> {
    digest
        .strip_prefix(DIGEST_PREFIX)
        .filter(|hex| hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)))
}

/// What is known of a layer, kept beside its tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMeta {
    pub digest: String,
    /// Bytes of file content.
    pub size_bytes: u64,
    pub entries: u64,
    /// It hides every layer below it (overlayfs ignores that marker at a root, so images leave those layers out).
    #[serde(default)]
    pub opaque_root: bool,
    /// It has whiteouts.
    #[serde(default)]
    pub hides: bool,
    /// Directories whose owner and mode are those of the layers below.
    #[serde(default)]
    pub implicit: Vec<String>,
    /// What was left out, for the user.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// A directory of one's own in `staging`, removed when dropped unless it was published.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    published: bool,
}

impl Scratch {
    pub fn new(staging: &Path) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = staging.join(name);
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("make", &path))?;
        Ok(Self { path, published: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the directory to `home`. If `home` exists, somebody else made the same: that one stays.
    pub fn publish(mut self, home: &Path) -> Result<()> {
        match fs::rename(&self.path, home) {
            Ok(()) => {
                self.published = true;
                Ok(())
            }
            Err(_) if home.exists() => Ok(()),
            Err(error) => Err(Error::io("rename into place", home)(error)),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed now goes at the next start, with all of `staging`.
            let _ = tree::remove(&self.path);
        }
    }
}

/// The layers of one store.
#[derive(Debug, Clone)]
pub struct Layers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    staging: PathBuf,
    held: Mutex<HashMap<String, Held>>,
}

#[derive(Debug, Default)]
struct Held {
    pins: usize,
    /// Taken by whoever makes the layer.
    flight: Arc<Mutex<()>>,
}

/// While it lives, the layer is not removed.
#[derive(Debug)]
pub struct Pin {
    layers: Layers,
    digest: String,
}

impl Layers {
    pub fn new(dir: PathBuf, staging: PathBuf) -> Self {
        Self(Arc::new(Inner { dir, staging, held: Mutex::default() }))
    }

    /// The tree of a layer. The digest has been checked with [`hex_of`].
    pub fn tree(&self, digest: &str) -> PathBuf {
        self.home(digest).join("fs")
    }

    fn home(&self, digest: &str) -> PathBuf {
        self.0.dir.join(digest.strip_prefix(DIGEST_PREFIX).unwrap_or(digest))
    }

    pub fn scratch(&self) -> Result<Scratch> {
        Scratch::new(&self.0.staging)
    }

    /// The layer `digest`, made by `make` (in `scratch/fs`) unless it is there. Concurrent callers make it once.
    pub fn obtain(&self, digest: &str, make: impl FnOnce(&Path) -> Result<LayerMeta>) -> Result<(LayerMeta, Pin)> {
        let pin = self.pin(digest);
        let flight = pin.flight();
        let _turn = flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(meta) = self.meta(digest)? {
            return Ok((meta, pin));
        }
        let scratch = self.scratch()?;
        let meta = make(&scratch.path().join("fs"))?;
        self.publish(scratch, &meta, Durability::Synced)?;
        Ok((meta, pin))
    }

    /// Takes in a layer whose digest was not known before it was made. `scratch` holds `fs`.
    pub fn take_in(&self, scratch: Scratch, meta: LayerMeta, durability: Durability) -> Result<(LayerMeta, Pin)> {
        let pin = self.pin(&meta.digest);
        let flight = pin.flight();
        let _turn = flight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = self.meta(&meta.digest)? {
            return Ok((there, pin));
        }
        self.publish(scratch, &meta, durability)?;
        Ok((meta, pin))
    }

    fn publish(&self, scratch: Scratch, meta: &LayerMeta, durability: Durability) -> Result<()> {
        let path = scratch.path().join("layer.json");
        fs::write(&path, to_json(meta)).map_err(Error::io("write", &path))?;
        if durability == Durability::Synced {
            // A digest is believed after a crash, so what it names must be on disk before it gets its name.
            let dir = fs::File::open(scratch.path()).map_err(Error::io("open", scratch.path()))?;
            rustix::fs::syncfs(&dir).map_err(Error::os("sync", scratch.path()))?;
        }
        scratch.publish(&self.home(&meta.digest))
    }

    /// What is known of a layer; `None` if it is not there.
    pub fn meta(&self, digest: &str) -> Result<Option<LayerMeta>> {
        let path = self.home(digest).join("layer.json");
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|error| Error::Damaged { path, reason: error.to_string() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", path)(error)),
        }
    }

    /// Holds a layer, there or not.
    pub fn pin(&self, digest: &str) -> Pin {
        let mut held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.entry(digest.to_owned()).or_default().pins += 1;
        Pin { layers: self.clone(), digest: digest.to_owned() }
    }

    /// Moves every layer that is neither in `wanted` nor pinned to `staging`; the caller drops what it gets, which
    /// deletes it, when it no longer holds locks.
    pub fn discard_except(&self, wanted: &HashSet<&str>) -> Result<Vec<Scratch>> {
        let mut discarded = Vec::new();
        let entries = fs::read_dir(&self.0.dir).map_err(Error::io("list", &self.0.dir))?;
        for entry in entries {
            let entry = entry.map_err(Error::io("list", &self.0.dir))?;
            let digest = format!("{DIGEST_PREFIX}{}", entry.file_name().to_string_lossy());
            let held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
            if wanted.contains(digest.as_str()) || held.contains_key(&digest) {
                continue;
            }
            let scratch = self.scratch()?;
            let to = scratch.path().join("discarded");
            fs::rename(entry.path(), &to).map_err(Error::io("move away", entry.path()))?;
            discarded.push(scratch);
        }
        Ok(discarded)
    }
}

/// Whether a layer must survive a power failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    Synced,
    /// For ephemeral images, which the next start removes anyway.
    Cached,
}

impl Pin {
    fn flight(&self) -> Arc<Mutex<()>> {
        let mut held = self.layers.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&held.entry(self.digest.clone()).or_default().flight)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut held = self.layers.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = held.get_mut(&self.digest) {
            entry.pins -= 1;
            if entry.pins == 0 {
                held.remove(&self.digest);
            }
        }
    }
}

/// JSON of a type of ours, which cannot fail: its maps have string keys.
pub fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}
