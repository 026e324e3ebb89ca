//! Names of images: what may be one, how one is found, and the file that keeps them.

use std::{collections::BTreeMap, fs, path::Path};

use serde::{de::DeserializeOwned, Serialize};

use super::{
    host,
    layers::{to_json, Durability, DIGEST_PREFIX},
    manifest::write_whole,
    Error, Result,
};

const MAX_LEN: usize = 255;
/// Fewer digits of an id are no abbreviation but a coincidence.
const MIN_ID_DIGITS: usize = 12;

/// Whether `name` can name an image.
pub fn check(name: &str) -> Result<()> {
    let refuse = |reason| Err(Error::InvalidName { name: name.to_owned(), reason });
    if name.is_empty() || name.len() > MAX_LEN {
        return refuse("a name has 1 to 255 characters");
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-/:@+".contains(&byte)) {
        return refuse("a name is made of letters, digits and . _ - / : @ +");
    }
    if !name.as_bytes()[0].is_ascii_alphanumeric() {
        return refuse("a name begins with a letter or a digit");
    }
    if name == host::NAME || name.starts_with(host::ID_PREFIX) {
        return refuse("\"host\" is this machine's own image");
    }
    if name.starts_with(DIGEST_PREFIX) {
        return refuse("names that begin with sha256: are ids");
    }
    Ok(())
}

/// The id for a name, a name without its `:latest`, an id, or the beginning of one (12 digits at least).
pub fn find<'a>(
    names: &BTreeMap<String, String>,
    name_or_id: &str,
    ids: impl Iterator<Item = &'a String>,
) -> Option<String> {
    if let Some(id) = names.get(name_or_id).or_else(|| names.get(&format!("{name_or_id}:latest"))) {
        return Some(id.clone());
    }
    let digits = name_or_id.strip_prefix(DIGEST_PREFIX).unwrap_or(name_or_id);
    if digits.len() < MIN_ID_DIGITS {
        return None;
    }
    let mut fitting = ids.filter(|id| id[DIGEST_PREFIX.len()..].starts_with(digits));
    match (fitting.next(), fitting.next()) {
        (Some(id), None) => Some(id.clone()),
        _ => None,
    }
}

/// A map kept as JSON; empty if the file is not there.
pub fn load<V: DeserializeOwned>(path: &Path) -> Result<BTreeMap<String, V>> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text)
            .map_err(|error| Error::Damaged { path: path.to_owned(), reason: error.to_string() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(Error::io("read", path)(error)),
    }
}

pub fn save(path: &Path, staging: &Path, map: &BTreeMap<String, impl Serialize>, durability: Durability) -> Result<()> {
    write_whole(path, staging, &to_json(map), durability)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["debian", "debian:12", "ghcr.io/a/b-c:1.0_x", "env:0123abcd", "a@sha256:ff"] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["", "host", "host:1", "sha256:00", "-x", "../x", "a b", "a\nb", "é", &"x".repeat(256)] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_and_ids_are_found() {
        let ids = [format!("sha256:{}", "a".repeat(64)), format!("sha256:{}b", "a".repeat(63))];
        let names = BTreeMap::from([("deb:latest".to_owned(), ids[0].clone())]);
        assert_eq!(find(&names, "deb:latest", ids.iter()), Some(ids[0].clone()));
        assert_eq!(find(&names, "deb", ids.iter()), Some(ids[0].clone()));
        assert_eq!(find(&names, &ids[1], ids.iter()), Some(ids[1].clone()));
        assert_eq!(find(&names, &"a".repeat(64), ids.iter()), Some(ids[0].clone()));
        assert_eq!(find(&names, &"a".repeat(20), ids.iter()), None, "ambiguous");
        assert_eq!(find(&names, "aaa", ids.iter()), None, "too short");
        assert_eq!(find(&names, "ab", ids.iter()), None);
    }
}
