//! The image `host`: this machine's own programs, without anything that is the machine's own business.
//!
//! Two trees. `/usr` is the host's, read-only below a private overlay. `/` is a skeleton that the store builds: the
//! links into `usr`, empty directories, and of `/etc` only what an allow-list names. Homes, secrets and run-time state
//! are out of reach because nothing else of the host is ever mounted.
//!
//! The skeleton's id is a fingerprint of everything it is made of, and of the package database, which stands for `/usr`.

mod accounts;
mod selection;
mod skeleton;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{Error, ImageConfig, Result, Tree};

/// The name under which users ask for it.
pub const NAME: &str = "host";
/// What the id of a host image begins with.
pub const ID_PREFIX: &str = "host:";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Builds the skeleton of `host_root` under `host_dir` unless it is there already; answers its id.
///
/// About 3 ms when it is there, 20 to 40 ms when it must be built.
pub fn prepare(host_root: &Path, host_dir: &Path, staging: &Path) -> Result<String> {
    let selection = selection::Selection::of(host_root)?;
    let hex = selection.fingerprint();
    let home = host_dir.join(&hex);
    if !home.exists() {
        let scratch = super::layers::Scratch::new(staging)?;
        skeleton::build(host_root, &selection, &scratch.path().join("fs"))?;
        scratch.publish(&home)?;
    }
    Ok(format!("{ID_PREFIX}{hex}"))
}

/// The trees of the host image whose skeleton is `fs`.
pub fn trees(fs: PathBuf) -> Vec<Tree> {
    vec![
        Tree { target: PathBuf::from("/"), lower: vec![fs] },
        Tree { target: PathBuf::from("/usr"), lower: vec![PathBuf::from("/usr")] },
    ]
}

pub fn config() -> ImageConfig {
    let env = BTreeMap::from([("PATH".to_owned(), PATH.to_owned()), ("LANG".to_owned(), "C.UTF-8".to_owned())]);
    ImageConfig { env, ..ImageConfig::default() }
}

/// The hexadecimal part of a host id, if it is one.
pub fn hex_of(id: &str) -> Option<&str> {
    id.strip_prefix(ID_PREFIX).filter(|hex| !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn unsupported(reason: impl Into<String>) -> Error {
    Error::HostUnsupported { reason: reason.into() }
}
