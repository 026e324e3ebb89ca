//! Extended attributes.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    os::fd::BorrowedFd,
};

use rustix::{
    fs::{fgetxattr, flistxattr, fremovexattr, fsetxattr, XattrFlags},
    io::Errno,
};

/// The kernel's limit of one value, and of all names together.
const VALUE_LIMIT_BYTES: usize = 64 << 10;

/// The names of a file's attributes; none where the file system has no such thing.
pub fn names(file: BorrowedFd<'_>) -> Vec<CString> {
    // The usual answer is "none": asked for first, without the room.
    if matches!(flistxattr(file, &mut [0_u8; 0]), Ok(0) | Err(_)) {
        return Vec::new();
    }
    let mut buffer = vec![0_u8; VALUE_LIMIT_BYTES];
    let Ok(length) = flistxattr(file, &mut buffer) else { return Vec::new() };
    buffer.truncate(length);
    buffer.split_inclusive(|byte| *byte == 0).filter_map(|name| CString::from_vec_with_nul(name.to_vec()).ok()).collect()
}

pub fn value(file: BorrowedFd<'_>, name: &CStr) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0_u8; VALUE_LIMIT_BYTES];
    let length = fgetxattr(file, name, &mut buffer)?;
    buffer.truncate(length);
    Ok(buffer)
}

pub fn set(file: BorrowedFd<'_>, name: &CStr, value: &[u8]) -> Result<(), Errno> {
    fsetxattr(file, name, value, XattrFlags::empty())
}

/// Copies the attributes of the user's namespace, as far as both file systems have them.
pub fn copy_user(from: BorrowedFd<'_>, to: BorrowedFd<'_>) {
    for name in names(from).iter().filter(|name| name.to_bytes().starts_with(b"user.")) {
        if let Ok(value) = value(from, name) {
            let _ = set(to, name, &value);
        }
    }
}

/// The attributes whose names begin with `prefix`, without it, as far as they are text.
pub fn texts(file: BorrowedFd<'_>, prefix: &str) -> BTreeMap<String, String> {
    let text = |name: &CString| {
        let key = name.to_str().ok()?.strip_prefix(prefix)?;
        Some((key.to_owned(), String::from_utf8(value(file, name).ok()?).ok()?))
    };
    names(file).iter().filter_map(text).collect()
}

/// Makes `texts` the only attributes whose names begin with `prefix`.
pub fn replace_texts(file: BorrowedFd<'_>, prefix: &str, texts: &BTreeMap<String, String>) -> Result<(), Errno> {
    for name in names(file).iter().filter(|name| name.to_bytes().starts_with(prefix.as_bytes())) {
        fremovexattr(file, name)?;
    }
    for (key, value) in texts {
        fsetxattr(file, format!("{prefix}{key}"), value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}
