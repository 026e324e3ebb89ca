//! What kind of image a file is, by what is in it.

use std::{fs::File, path::Path};

use super::{stream::Decompressed, Format};
use crate::images::{
    tar::{Tar, TarError},
    Error, Result,
};

/// Looks at `path`. Of a tar, members are read until one tells.
pub fn detect(path: &Path) -> Result<Format> {
    let unreadable = |source| Error::Unreadable { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if metadata.is_dir() {
        return Ok(if path.join("oci-layout").is_file() { Format::Oci } else { Format::Dir });
    }
    let label = path.to_string_lossy();
    const EXPECTED: &str = "an OCI layout, a docker archive, a tar of a root file system, or a directory";
    if !metadata.is_file() {
        return Err(Error::malformed(label, EXPECTED, "something that is neither a file nor a directory"));
    }
    let mut tar = Tar::new(Decompressed::new(File::open(path).map_err(unreadable)?, &label)?);
    let (mut has_layout, mut has_manifest) = (false, false);
    loop {
        match tar.next() {
            Ok(None) => break,
            Ok(Some(entry)) => match trimmed(&entry.path) {
                b"oci-layout" => has_layout = true,
                b"manifest.json" => has_manifest = true,
                name if !is_of_archive(name) => return Ok(Format::Tar),
                _ => {}
            },
            Err(TarError::Bad { at: 512, .. }) => return Err(Error::malformed(label, EXPECTED, "none of these")),
            Err(error) => return Err(error.of(&label)),
        }
    }
    // Docker writes both since version 25.
    match (has_manifest, has_layout) {
        (true, _) => Ok(Format::DockerArchive),
        (false, true) => Ok(Format::Oci),
        (false, false) => Ok(Format::Tar),
    }
}

fn trimmed(path: &[u8]) -> &[u8] {
    let path = path.strip_prefix(b"./").unwrap_or(path);
    path.strip_suffix(b"/").unwrap_or(path)
}

/// Whether a name is one that archives of images have, and root file systems have not.
fn is_of_archive(name: &[u8]) -> bool {
    let first = name.split(|&byte| byte == b'/').next().unwrap_or_default();
    let stem = first.split(|&byte| byte == b'.').next().unwrap_or_default();
    matches!(first, b"" | b"." | b"blobs" | b"index.json" | b"oci-layout" | b"manifest.json" | b"repositories")
        || (stem.len() == 64 && stem.iter().all(u8::is_ascii_hexdigit))
}
