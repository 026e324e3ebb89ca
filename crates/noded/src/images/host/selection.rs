//! What of the host's `/etc` the host image may show, and the fingerprint over it.
//!
//! An allow-list, because a host's `/etc` holds keys, hashes and names that a list of exceptions would miss. Beyond the
//! list two guards apply to every file: what is not readable by everybody on the host stays out, and so does what looks
//! like a private key or carries a credential.

use std::{
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::unsupported;
use crate::images::{Error, Result};

/// Raised when the skeleton is built differently, so that old ones are not used again.
const SKELETON_VERSION: u32 = 1;
/// Files and directories of `/etc`; a trailing `*` matches any rest of the name.
const ALLOWED: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "bash_completion*",
    "bindresvport.blacklist",
    "ca-certificates*",
    "debian_version",
    "dpkg",
    "fonts",
    "gai.conf",
    "glvnd",
    "groff",
    "host.conf",
    "inputrc",
    "issue",
    "java*",
    "ld.so.cache",
    "ld.so.conf*",
    "locale.alias",
    "locale.conf",
    "locale.gen",
    "localtime",
    "login.defs",
    "magic*",
    "mailcap",
    "manpath.config",
    "mime.types",
    "mtab",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "pam.d",
    "perl",
    "pip.conf",
    "profile*",
    "protocols",
    "python3*",
    "R",
    "redhat-release",
    "rpc",
    "security",
    "services",
    "sgml",
    "shells",
    "skel",
    "terminfo",
    "timezone",
    "xml",
    "zsh_command_not_found",
];
/// The same below a directory of `/etc` that is not shown as a whole.
const ALLOWED_BELOW: &[(&str, &[&str])] = &[
    ("default", &["locale", "useradd"]),
    ("pki", &["ca-trust", "tls/cert.pem", "tls/certs"]),
    ("ssl", &["certs", "openssl.cnf", "cert.pem"]),
];
/// Larger files of `/etc` are data bases of something, not settings.
const MAX_FILE_BYTES: u64 = 8 << 20;
const MAX_ENTRIES: usize = 50_000;

/// One entry to put into the skeleton's `/etc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Relative to `/etc`.
    pub path: PathBuf,
    pub kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Dir,
    File { mode: u32, len: u64, mtime: (i64, i64) },
    Symlink(PathBuf),
}

/// What the skeleton is made of, parents before children.
#[derive(Debug)]
pub struct Selection {
    /// Links at the root: `bin` -> `usr/bin`.
    pub root_links: Vec<(String, PathBuf)>,
    pub etc: Vec<Entry>,
    /// Metadata of further files whose change makes another image: accounts, the package database.
    stamps: Vec<String>,
}

impl Selection {
    /// Looks at the host: only metadata is read, about a thousand `lstat`.
    pub fn of(host_root: &Path) -> Result<Self> {
        let root_links = root_links(host_root)?;
        let etc_root = host_root.join("etc");
        let mut etc = Vec::new();
        let mut names: Vec<PathBuf> = fs::read_dir(&etc_root)
            .map_err(Error::io("list", &etc_root))?
            .filter_map(|entry| Some(PathBuf::from(entry.ok()?.file_name())))
            .filter(|name| ALLOWED.iter().any(|pattern| matches(pattern, name)))
            .collect();
        names.sort();
        for name in names {
            select(&etc_root, &name, &mut etc)?;
        }
        for (dir, below) in ALLOWED_BELOW {
            let Ok(metadata) = fs::symlink_metadata(etc_root.join(dir)) else { continue };
            if !metadata.is_dir() {
                continue;
            }
            etc.push(Entry { path: PathBuf::from(dir), kind: Kind::Dir });
            for name in *below {
                let path = Path::new(dir).join(name);
                if let Some(parent) = path.parent().filter(|parent| *parent != Path::new(dir)) {
                    if etc_root.join(parent).is_dir() && !etc.iter().any(|entry| entry.path == parent) {
                        etc.push(Entry { path: parent.to_owned(), kind: Kind::Dir });
                    }
                }
                select(&etc_root, &path, &mut etc)?;
            }
        }
        let stamps = ["etc/passwd", "etc/group", "var/lib/dpkg/status", "var/lib/rpm", "var/lib/pacman/local", "usr"]
            .iter()
            .map(|path| stamp(&host_root.join(path)))
            .chain(["bin", "sbin", "lib"].iter().map(|name| stamp(&host_root.join("usr/local").join(name))))
            .collect();
        Ok(Self { root_links, etc, stamps })
    }

    /// Changes when anything shown changes.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(SKELETON_VERSION.to_le_bytes());
        hash.update(env!("CARGO_PKG_VERSION"));
        for (name, target) in &self.root_links {
            field(&mut hash, name.as_bytes());
            field(&mut hash, target.as_os_str().as_bytes());
        }
        for Entry { path, kind } in &self.etc {
            field(&mut hash, path.as_os_str().as_bytes());
            match kind {
                Kind::Dir => hash.update(b"d"),
                Kind::File { mode, len, mtime } => {
                    hash.update(b"f");
                    field(&mut hash, format!("{mode:o} {len} {mtime:?}").as_bytes());
                }
                Kind::Symlink(target) => {
                    hash.update(b"l");
                    field(&mut hash, target.as_os_str().as_bytes());
                }
            }
        }
        for stamp in &self.stamps {
            field(&mut hash, stamp.as_bytes());
        }
        let mut hex = crate::images::layers::hex(&hash.finalize());
        hex.truncate(32);
        hex
    }
}

/// `bin`, `sbin`, `lib` must be links into `usr` (a "merged /usr"); `lib64` and its kin are where they exist.
fn root_links(host_root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut links = Vec::new();
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"] {
        let path = host_root.join(name);
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.file_type().is_symlink() => {
                let target = fs::read_link(&path).map_err(Error::io("read the link", &path))?;
                let inside = target.strip_prefix("/").unwrap_or(&target);
                if !inside.starts_with("usr") {
                    return Err(unsupported(format!("/{name} points to {}, not into /usr", target.display())));
                }
                links.push((name.to_owned(), target));
            }
            Ok(_) => {
                return Err(unsupported(format!(
                    "/{name} is a directory of its own, but programs must lie under /usr (a \"merged /usr\", as on \
                     Debian since 12, Fedora, Arch)"
                )))
            }
            Err(_) if !matches!(name, "bin" | "lib") => {}
            Err(_) => return Err(unsupported(format!("there is no /{name}"))),
        }
    }
    Ok(links)
}

fn select(etc_root: &Path, path: &Path, out: &mut Vec<Entry>) -> Result<()> {
    let full = etc_root.join(path);
    let Ok(metadata) = fs::symlink_metadata(&full) else { return Ok(()) };
    if out.len() >= MAX_ENTRIES {
        return Err(unsupported(format!("/etc has more than {MAX_ENTRIES} entries to copy")));
    }
    let kind = metadata.file_type();
    if kind.is_symlink() {
        if let Ok(target) = fs::read_link(&full) {
            out.push(Entry { path: path.to_owned(), kind: Kind::Symlink(target) });
        }
    } else if kind.is_file() {
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o004 != 0 && metadata.len() <= MAX_FILE_BYTES && !has_key_name(path) {
            let mtime = (metadata.mtime(), metadata.mtime_nsec());
            out.push(Entry { path: path.to_owned(), kind: Kind::File { mode, len: metadata.len(), mtime } });
        }
    } else if kind.is_dir() && metadata.permissions().mode() & 0o005 == 0o005 {
        out.push(Entry { path: path.to_owned(), kind: Kind::Dir });
        let Ok(entries) = fs::read_dir(&full) else { return Ok(()) };
        let mut names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
        names.sort();
        for name in names {
            select(etc_root, &path.join(name), out)?;
        }
    }
    Ok(())
}

/// Whether a file's content must not leave the host although its name is allowed.
pub fn is_secret(path: &Path, content: &[u8]) -> bool {
    contains(content, b"PRIVATE KEY-----") || (is_free_text(path) && carries_credential(content))
}

/// Files in which administrators write what they like, credentials of proxies and indexes among it.
fn is_free_text(path: &Path) -> bool {
    let first = path.iter().next().map(OsStrExt::as_bytes).unwrap_or_default();
    [&b"profile"[..], b"bash.bashrc", b"bash_completion", b"pip.conf", b"default", b"skel"]
        .iter()
        .any(|name| first.starts_with(name))
}

/// `https://name:secret@host`, or an assignment to something named like a secret.
fn carries_credential(content: &[u8]) -> bool {
    content.split(|&byte| byte == b'\n').any(|line| {
        let line = String::from_utf8_lossy(line).to_ascii_lowercase();
        let in_url = line.split("://").skip(1).any(|rest| {
            let authority = rest.split(['/', ' ', '"', '\'']).next().unwrap_or_default();
            authority.contains('@')
        });
        let assigned = line.split_once('=').is_some_and(|(name, value)| {
            let name = name.trim();
            let named = ["password", "passwd", "token", "secret", "api_key", "apikey", "access_key", "credential"];
            !value.trim().is_empty() && !name.starts_with('#') && named.iter().any(|word| name.contains(word))
        });
        in_url || assigned
    })
}

fn has_key_name(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["key", "p12", "pfx", "keytab", "jks"].iter().any(|bad| extension == *bad))
}

fn matches(pattern: &str, name: &Path) -> bool {
    let name = name.as_os_str().as_bytes();
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start.as_bytes()),
        None => name == pattern.as_bytes(),
    }
}

fn contains(content: &[u8], needle: &[u8]) -> bool {
    content.windows(needle.len()).any(|window| window == needle)
}

fn stamp(path: &Path) -> String {
    match fs::symlink_metadata(path) {
        Ok(metadata) => format!("{} {}.{}", metadata.len(), metadata.mtime(), metadata.mtime_nsec()),
        Err(_) => "-".to_owned(),
    }
}

fn field(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_seen() {
        let conf = Path::new("pip.conf");
        assert!(is_secret(conf, b"[global]\nindex-url = https://bob:pw@pypi.example/simple\n"));
        assert!(is_secret(conf, b"[global]\npassword = x\n"));
        assert!(!is_secret(conf, b"[global]\nindex-url = https://pypi.example/simple\n# password = \n"));
        assert!(is_secret(Path::new("profile.d/corp.sh"), b"export http_proxy=http://u:p@proxy:3128/\n"));
        assert!(is_secret(Path::new("profile.d/corp.sh"), b"export GITHUB_TOKEN=abc\n"));
        assert!(is_secret(Path::new("ssl/certs/x.pem"), b"-----BEGIN EC PRIVATE KEY-----\n"));
        assert!(!is_secret(Path::new("services"), b"passwords=1"));
    }

    #[test]
    fn patterns_match_whole_names_or_beginnings() {
        assert!(matches("python3*", Path::new("python3.11")));
        assert!(!matches("perl", Path::new("perl5")));
        assert!(!ALLOWED.iter().any(|pattern| ["shadow", "ssh", "ssl", "sudoers", "gitconfig", "machine-id", "npmrc"]
            .iter()
            .any(|name| matches(pattern, Path::new(name)))));
    }
}
