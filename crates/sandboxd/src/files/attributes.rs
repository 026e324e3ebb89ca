//! Extended attributes.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    os::fd::BorrowedFd,
    path::Path,
};

use rustix::{
    fs::{
        fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr, getxattr, listxattr, listxattr_query,
        XattrFlags,
    },
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
    fn list_size(self) -> Result<usize, Errno> {
        match self {
            Self::File(file) => flistxattr_query(file),
            Self::Path(path) => listxattr_query(path),
        }
    }

    fn list(self, buffer: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::File(file) => flistxattr(file, buffer),
            Self::Path(path) => listxattr(path, buffer),
        }
    }

    /// The names; none where the file system has no such thing.
    pub fn names(self) -> Vec<CString> {
        // The usual answer is "none": asked for first, without the room.
        if matches!(self.list_size(), Ok(0) | Err(_)) {
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

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsFd as _};

    use super::{super::scratch::Scratch, *};

    #[test]
    fn texts_are_replaced_as_a_whole_and_others_stay() {
        let scratch = Scratch::new();
        let file = File::create(scratch.path("f")).unwrap();
        let texts = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect::<BTreeMap<_, _>>()
        };
        if set(file.as_fd(), c"user.other", b"\xff") == Err(Errno::OPNOTSUPP) {
            eprintln!("this file system has no attributes");
            return;
        }
        replace_texts(file.as_fd(), "user.x.", &texts(&[("a", "1"), ("b", "2")])).unwrap();
        replace_texts(file.as_fd(), "user.x.", &texts(&[("b", "3"), ("c", "")])).unwrap();
        assert_eq!(Of::Path(&scratch.path("f")).texts("user.x."), texts(&[("b", "3"), ("c", "")]));
        assert_eq!(Of::File(file.as_fd()).texts("user."), texts(&[("x.b", "3"), ("x.c", "")]));
        let copy = File::create(scratch.path("g")).unwrap();
        copy_user(file.as_fd(), copy.as_fd());
        assert_eq!(Of::File(copy.as_fd()).value(c"user.other").unwrap(), b"\xff");
        assert_eq!(Of::Path(&scratch.path("none")).names().len(), 0);
    }
}
