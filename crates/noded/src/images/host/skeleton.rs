//! Builds the skeleton: the root file system of the host image without `/usr`.

use std::{
    fs,
    os::unix::fs::{chown, lchown, symlink, PermissionsExt},
    path::{Path, PathBuf},
};

use super::{
    accounts::{self, USER, USER_ID},
    selection::{is_secret, Entry, Kind, Selection},
};
use crate::images::{Error, Result};

/// Directories that every Linux root has, with their modes; parents first.
const DIRS: &[(&str, u32)] = &[
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/lib/dpkg", 0o755),
    ("var/lib/dpkg/info", 0o755),
    ("var/lib/dpkg/updates", 0o755),
    ("var/lib/dpkg/triggers", 0o755),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o755),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];
/// Directories of `/etc` that programs expect even when the host's content stays out.
const ETC_DIRS: &[&str] = &["default", "ssl", "opt"];
/// Root's shell start files, where the distribution keeps their originals.
const ROOT_FILES: &[(&str, &str)] =
    &[("usr/share/base-files/dot.bashrc", "root/.bashrc"), ("usr/share/base-files/dot.profile", "root/.profile")];

/// Builds into `fs`, which must not exist.
pub fn build(host_root: &Path, selection: &Selection, fs_root: &Path) -> Result<()> {
    make_dir(fs_root, 0o755)?;
    for (path, mode) in DIRS {
        make_dir(&fs_root.join(path), *mode)?;
    }
    for (name, target) in &selection.root_links {
        link(target, &fs_root.join(name))?;
    }
    link(Path::new("/run"), &fs_root.join("var/run"))?;
    link(Path::new("/run/lock"), &fs_root.join("var/lock"))?;
    copy_etc(host_root, selection, &fs_root.join("etc"))?;
    write_accounts(host_root, fs_root)?;
    for (from, to) in ROOT_FILES {
        if let Ok(content) = fs::read(host_root.join(from)) {
            write(&fs_root.join(to), &content, 0o644)?;
        }
    }
    write_package_database(host_root, fs_root)?;
    make_home(fs_root)
}

fn copy_etc(host_root: &Path, selection: &Selection, etc: &Path) -> Result<()> {
    for Entry { path, kind } in &selection.etc {
        let to = etc.join(path);
        match kind {
            Kind::Dir => make_dir(&to, 0o755)?,
            Kind::Symlink(target) => link(target, &to)?,
            Kind::File { mode, .. } => {
                // A file that vanished or was closed to us since the selection is simply not shown.
                let Ok(content) = fs::read(host_root.join("etc").join(path)) else { continue };
                if !is_secret(path, &content) {
                    write(&to, &content, *mode)?;
                }
            }
        }
    }
    for name in ETC_DIRS {
        let dir = etc.join(name);
        if !dir.exists() {
            make_dir(&dir, 0o755)?;
        }
    }
    Ok(())
}

fn write_accounts(host_root: &Path, fs_root: &Path) -> Result<()> {
    let read = |name: &str| fs::read(host_root.join(name)).map(|text| String::from_utf8_lossy(&text).into_owned());
    let shell = ["/bin/bash", "/bin/sh"].iter().find(|shell| {
        // Through the merged links: /bin/bash is usr/bin/bash.
        host_root.join("usr").join(shell.trim_start_matches('/')).exists()
    });
    let accounts = accounts::reduce(
        &read("etc/passwd").unwrap_or_default(),
        &read("etc/group").unwrap_or_default(),
        shell.copied().unwrap_or("/bin/sh"),
    );
    write(&fs_root.join("etc/passwd"), accounts.passwd.as_bytes(), 0o644)?;
    write(&fs_root.join("etc/group"), accounts.group.as_bytes(), 0o644)?;
    write(&fs_root.join("etc/shadow"), accounts.shadow.as_bytes(), 0o600)
}

/// The list of installed packages, so that package tools know what `/usr` holds. Their file lists stay out: they are
/// tens of thousands of files.
fn write_package_database(host_root: &Path, fs_root: &Path) -> Result<()> {
    let status = fs::read(host_root.join("var/lib/dpkg/status")).unwrap_or_default();
    write(&fs_root.join("var/lib/dpkg/status"), &status, 0o644)?;
    write(&fs_root.join("var/lib/dpkg/available"), b"", 0o644)?;
    write(&fs_root.join("var/lib/dpkg/info/format"), b"1\n", 0o644)
}

/// `/home/user`, from the image's own `/etc/skel` (which has passed the guards).
fn make_home(fs_root: &Path) -> Result<()> {
    let home = fs_root.join("home").join(USER);
    make_dir(&home, 0o755)?;
    chown(&home, Some(USER_ID), Some(USER_ID)).map_err(Error::io("change the owner of", &home))?;
    let mut pending = vec![(fs_root.join("etc/skel"), home)];
    while let Some((from, to)) = pending.pop() {
        let Ok(entries) = fs::read_dir(&from) else { continue };
        for entry in entries {
            let entry = entry.map_err(Error::io("list", &from))?;
            let (source, target) = (entry.path(), to.join(entry.file_name()));
            let metadata = entry.metadata().map_err(Error::io("stat", &source))?;
            if metadata.is_dir() {
                make_dir(&target, 0o755)?;
                pending.push((source, target.clone()));
            } else if metadata.is_symlink() {
                link(&fs::read_link(&source).map_err(Error::io("read the link", &source))?, &target)?;
            } else {
                let content = fs::read(&source).map_err(Error::io("read", &source))?;
                write(&target, &content, metadata.permissions().mode() & 0o777)?;
            }
            lchown(&target, Some(USER_ID), Some(USER_ID)).map_err(Error::io("change the owner of", &target))?;
        }
    }
    Ok(())
}

fn make_dir(path: &Path, mode: u32) -> Result<()> {
    fs::create_dir(path).map_err(Error::io("make", path))?;
    set_mode(path, mode)
}

fn write(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    fs::write(path, content).map_err(Error::io("write", path))?;
    set_mode(path, mode)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(Error::io("set the mode of", path))
}

fn link(target: &Path, path: &Path) -> Result<()> {
    symlink(target, path).map_err(Error::io("make the link", PathBuf::from(path)))
}
