//! What the kernel answers, as typed errors of the wire.

use std::{io, os::unix::ffi::OsStrExt as _, path::Path};

use rustix::io::Errno;
use sandmill_wire::ApiError;

/// The error of a call on `path`; `doing` completes "cannot … /the/path".
pub fn failed(doing: &str, path: &Path, errno: Errno) -> ApiError {
    let (status, code, hint): (u16, &str, Option<&str>) = match errno {
        Errno::NOENT => (404, "not_found", None),
        Errno::EXIST => (409, "already_exists", None),
        Errno::ISDIR => (400, "is_a_directory", Some("use list, or tar for a whole directory")),
        Errno::NOTDIR => (400, "not_a_directory", None),
        Errno::NOTEMPTY => (409, "not_empty", Some("remove it with recursive=true")),
        Errno::LOOP => (400, "too_many_links", Some("the path leads through a loop of links, or a link of /proc")),
        Errno::NAMETOOLONG => (400, "path_too_long", Some("a name has at most 255 bytes, a path 4095")),
        Errno::NOSPC | Errno::DQUOT => (507, "no_space", Some("free space or inodes, or ask for a larger disk_mb")),
        Errno::FBIG => (413, "file_too_large", None),
        Errno::ROFS => (403, "read_only", Some("this file system is mounted read-only")),
        Errno::ACCESS | Errno::PERM => (403, "permission_denied", None),
        Errno::BUSY | Errno::TXTBSY => (409, "busy", Some("it is a mount point or in use")),
        Errno::XDEV => (409, "crosses_filesystems", Some("copy and remove, as mv in a shell does")),
        Errno::NXIO | Errno::NODEV => (400, "not_a_regular_file", None),
        Errno::INVAL | Errno::ILSEQ => (400, "invalid_argument", None),
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => (503, "busy", Some("try again in a moment")),
        Errno::OPNOTSUPP => (400, "not_supported", Some("this file system cannot do that")),
        _ => (500, "io_error", None),
    };
    let reason = io::Error::from_raw_os_error(errno.raw_os_error());
    let mut error = ApiError::new(status, code, format!("cannot {doing} {}: {reason}", shown(path)));
    error.hint = hint.map(str::to_owned);
    error.retryable = status == 503;
    error
}

/// As [`failed`], for the standard library's errors.
pub fn failed_io(doing: &str, path: &Path, error: &io::Error) -> ApiError {
    match Errno::from_io_error(error) {
        Some(errno) => failed(doing, path, errno),
        None => ApiError::new(500, "io_error", format!("cannot {doing} {}: {error}", shown(path))),
    }
}

/// The error for what is there but holds no plain bytes.
pub fn not_regular(path: &Path, kind: &str) -> ApiError {
    ApiError::new(400, "not_a_regular_file", format!("{} is not a regular file but a {kind}", shown(path)))
        .hint("open it from a command in the sandbox")
        .details(serde_json::json!({ "type": kind }))
}

pub fn is_directory(path: &Path) -> ApiError {
    failed("use as a file", path, Errno::ISDIR)
}

/// A path for a message: bytes that are not UTF-8, and control characters, escaped.
pub fn shown(path: &Path) -> String {
    path.as_os_str().as_bytes().utf8_chunks().fold(String::new(), |mut text, chunk| {
        for character in chunk.valid().chars() {
            if character.is_control() {
                text.extend(character.escape_default());
            } else {
                text.push(character);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_answers_are_typed() {
        let error = failed("read", Path::new("/x"), Errno::NOENT);
        assert_eq!((error.status, error.code.as_str()), (404, "not_found"));
        assert_eq!(failed("write", Path::new("/x"), Errno::DQUOT).code, "no_space");
        assert_eq!(failed("write", Path::new("/x"), Errno::IO).status, 500);
    }

    #[test]
    fn odd_names_can_be_shown() {
        use std::ffi::OsStr;
        assert_eq!(shown(Path::new(OsStr::from_bytes(b"/a\xff\n\xc3\xa9"))), "/a\\xff\\n\u{e9}");
    }
}
