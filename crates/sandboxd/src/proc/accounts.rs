//! Users and groups of the image, from its /etc/passwd and /etc/group, which it may lack.

use std::{cell::RefCell, collections::HashMap, io::Read as _, rc::Rc, sync::Arc};

use rustix::fs::{Mode, OFlags};
use sandmill_wire::ApiError;

/// Longest /etc/passwd or /etc/group that is looked at.
const FILE_LIMIT_BYTES: u64 = 4 << 20;

/// An identity to run with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// The user's name; the uid's digits where the image doesn't name it.
    pub name: String,
    pub home: String,
}

/// The image's accounts; read again when the files changed.
#[derive(Default)]
pub struct Accounts {
    passwd: RefCell<Cached>,
    group: RefCell<Cached>,
}

#[derive(Default)]
struct Cached {
    /// Inode, size and times of change: what tells one version of the file from another.
    version: Option<(u64, i64, i64, u64, i64, u64)>,
    text: Rc<str>,
}

impl Accounts {
    /// The account of `user`: a name, a uid, `uid:gid`, or names in both places.
    ///
    /// Errors: 400 `user_not_found`.
    pub fn resolve(&self, user: &str) -> Result<Account, ApiError> {
        let passwd = self.passwd.borrow_mut().read("/etc/passwd");
        let group = self.group.borrow_mut().read("/etc/group");
        resolve(user, &passwd, &group)
    }

    /// The names of all uids and gids, for threads that list files.
    pub fn names(&self) -> Arc<AccountNames> {
        let passwd = self.passwd.borrow_mut().read("/etc/passwd");
        let group = self.group.borrow_mut().read("/etc/group");
        let mut names = AccountNames::default();
        for line in passwd.lines().filter_map(User::parse) {
            names.users.entry(line.uid).or_insert_with(|| line.name.to_owned());
        }
        for (name, gid, _) in group.lines().filter_map(parse_group) {
            names.groups.entry(gid).or_insert_with(|| name.to_owned());
        }
        Arc::new(names)
    }
}

/// The names of the image's users and groups.
#[derive(Debug, Default)]
pub struct AccountNames {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl AccountNames {
    /// The user's name, or the digits of a uid that has none.
    pub fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// The group's name, or the digits of a gid that has none.
    pub fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

impl Cached {
    fn read(&mut self, path: &str) -> Rc<str> {
        let version = rustix::fs::stat(path).ok().map(|stat| {
            (stat.st_ino, stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec)
        });
        if version.is_none() || version != self.version {
            self.text = version.and_then(|_| read_regular(path)).unwrap_or_default().into();
            self.version = version;
        }
        Rc::clone(&self.text)
    }
}

/// Reads a file of the image; one that is a device or a pipe is as good as missing.
fn read_regular(path: &str) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > FILE_LIMIT_BYTES {
        return None;
    }
    let mut text = String::with_capacity(metadata.len() as usize + 1); // one read, and one for the end
    std::io::Read::take(&file, FILE_LIMIT_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

fn resolve(user: &str, passwd: &str, group: &str) -> Result<Account, ApiError> {
    let (user_part, group_part) = match user.split_once(':') {
        Some((user_part, group_part)) => (user_part, Some(group_part)),
        None => (user, None),
    };
    let line = passwd.lines().filter_map(User::parse).find(|line| line.name == user_part).or_else(|| {
        let uid: u32 = user_part.parse().ok()?;
        passwd.lines().filter_map(User::parse).find(|line| line.uid == uid)
    });
    let uid = match (&line, user_part.parse::<u32>()) {
        (Some(line), _) => line.uid,
        // The highest value means "no change" to the kernel.
        (None, Ok(uid)) if uid != u32::MAX => uid,
        (None, _) if user_part == "root" => 0,
        _ => {
            return Err(ApiError::new(400, "user_not_found", format!("the sandbox has no user {user_part:?}"))
                .hint("give a name in its /etc/passwd, a numeric uid, or uid:gid"))
        }
    };
    let name = line
        .as_ref()
        .map_or_else(|| if uid == 0 { "root".to_owned() } else { uid.to_string() }, |line| line.name.to_owned());
    let gid = match group_part {
        None => line.as_ref().map_or(0, |line| line.gid),
        Some(part) => group_id(part, group).ok_or_else(|| {
            ApiError::new(400, "user_not_found", format!("the sandbox has no group {part:?}"))
                .hint("give a name in its /etc/group or a numeric gid")
        })?,
    };
    // As Docker: a group that is named replaces the user's own ones.
    let groups = if group_part.is_some() || line.is_none() { Vec::new() } else { memberships(&name, group) };
    let home = match &line {
        Some(line) if !line.home.is_empty() => line.home.to_owned(),
        _ if uid == 0 => "/root".to_owned(),
        _ => "/".to_owned(),
    };
    Ok(Account { uid, gid, groups, name, home })
}

struct User<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> User<'a> {
    /// A line of /etc/passwd: `name:password:uid:gid:comment:home:shell`.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1).unwrap_or("");
        Some(Self { name, uid, gid, home })
    }
}

/// A line of /etc/group: `name:password:gid:members`.
fn parse_group(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let gid = fields.nth(1)?.parse().ok()?;
    Some((name, gid, fields.next().unwrap_or("")))
}

fn group_id(part: &str, group: &str) -> Option<u32> {
    let named = group.lines().filter_map(parse_group).find(|(name, _, _)| *name == part);
    named.map(|(_, gid, _)| gid).or_else(|| part.parse().ok().filter(|gid| *gid != u32::MAX))
}

fn memberships(user: &str, group: &str) -> Vec<u32> {
    let member = |members: &str| members.split(',').any(|member| member.trim() == user);
    group.lines().filter_map(parse_group).filter(|(_, _, members)| member(members)).map(|(_, gid, _)| gid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1001::/home/user:/bin/sh\n# comment\n\nbad:x:y\n";
    const GROUP: &str = "root:x:0:\nuser:x:1001:\naudio:x:29:user,other\nvideo:x:44:other, user\n";

    #[test]
    fn names_numbers_and_pairs() {
        let user = resolve("user", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.groups.as_slice()), (1000, 1001, &[29, 44][..]));
        assert_eq!(user.home, "/home/user");
        assert_eq!(resolve("1000", PASSWD, GROUP).unwrap(), user);
        let pair = resolve("1000:29", PASSWD, GROUP).unwrap();
        assert_eq!((pair.uid, pair.gid, pair.groups.len()), (1000, 29, 0));
        assert_eq!(resolve("user:audio", PASSWD, GROUP).unwrap().gid, 29);
    }

    #[test]
    fn an_image_without_accounts_has_numbers_and_root() {
        let number = resolve("12345", "", "").unwrap();
        assert_eq!((number.uid, number.gid, number.home.as_str(), number.name.as_str()), (12345, 0, "/", "12345"));
        let root = resolve("root", "", "").unwrap();
        assert_eq!((root.uid, root.home.as_str(), root.name.as_str()), (0, "/root", "root"));
        assert_eq!(resolve("0:0", "", "").unwrap().home, "/root");
    }

    #[test]
    fn unknown_names_are_refused() {
        for user in ["nobody-here", "user:nogroup", "4294967295", "-1", "", "99999999999"] {
            assert_eq!(resolve(user, PASSWD, GROUP).unwrap_err().code, "user_not_found", "{user}");
        }
    }
}
