//! Extended attributes.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    os::fd::BorrowedFd,
    path::Path,
};

use rustix::{
    fs::{fgetxattr, flistxattr, fremovexattr, fsetxattr, getxattr, listxattr, XattrFlags},
    io::Errno,
};

/// The kernel's limit of one value, and of all names together.
const VALUE_LIMIT_BYTES: usize = 64 << 10;

/// Whose attributes are read.
#[derive(Clone, Copy)]
pub enum Of<'a> {
    File(BorrowedFd<'a>),
    /// Links are followed; nothing is opened.
    Path(&'a Path),
}

impl Of<'_> {
    fn list(self, buffer: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::File(file) => flistxattr(file, buffer),
            Self::Path(path) => listxattr(path, buffer),
        }
    }

    /// The names; none where the file system has no such thing.
    pub fn names(self) -> Vec<CString> {
        // The usual answer is "none": asked for first, without the room.
        if matches!(self.list(&mut []), Ok(0) | Err(_)) {
            return Vec::new();
        }
        let mut buffer = vec![0_u8; VALUE_LIMIT_BYTES];
        let Ok(length) = self.list(&mut buffer) else { return Vec::new() };
        buffer.truncate(length);
        let name = |name: &[u8]| CString::from_vec_with_nul(name.to_vec()).ok();
        buffer.split_inclusive(|byte| *byte == 0).filter_map(name).collect()
    }

    pub fn value(self, name: &CStr) -> Result<Vec<u8>, Errno> {
        let mut buffer = vec![0_u8; VALUE_LIMIT_BYTES];
        let length = match self {
            Self::File(file) => fgetxattr(file, name, &mut buffer)?,
            Self::Path(path) => getxattr(path, name, &mut buffer)?,
        };
        buffer.truncate(length);
        Ok(buffer)
    }

    /// The attributes whose names begin with `prefix`, without it, as far as they are text.
    pub fn texts(self, prefix: &str) -> BTreeMap<String, String> {
        let text = |name: &CString| {
            let key = name.to_str().ok()?.strip_prefix(prefix)?;
            Some((key.to_owned(), String::from_utf8(self.value(name).ok()?).ok()?))
        };
        self.names().iter().filter_map(text).collect()
    }
}

pub fn set(file: BorrowedFd<'_>, name: &CStr, value: &[u8]) -> Result<(), Errno> {
    fsetxattr(file, name, value, XattrFlags::empty())
}

/// Copies the attributes of the user's namespace, as far as both file systems have them.
pub fn copy_user(from: BorrowedFd<'_>, to: BorrowedFd<'_>) {
    let from = Of::File(from);
    for name in from.names().iter().filter(|name| name.to_bytes().starts_with(b"user.")) {
        if let Ok(value) = from.value(name) {
            let _ = set(to, name, &value);
        }
    }
}

/// Makes `texts` the only attributes whose names begin with `prefix`.
pub fn replace_texts(file: BorrowedFd<'_>, prefix: &str, texts: &BTreeMap<String, String>) -> Result<(), Errno> {
    for name in Of::File(file).names().iter().filter(|name| name.to_bytes().starts_with(prefix.as_bytes())) {
        fremovexattr(file, name)?;
    }
    for (key, value) in texts {
        fsetxattr(file, format!("{prefix}{key}"), value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}
