//! The account files of the host image: system accounts as the host has them, no person, no password.

use std::fmt::Write;

/// Ids from here on are people's, except [`NOBODY`].
const FIRST_PERSON: u32 = 1000;
const NOBODY: u32 = 65534;
/// The account for a sandbox's user.
pub const USER: &str = "user";
pub const USER_ID: u32 = 1000;

/// `passwd`, `group` and `shadow` for the image.
#[derive(Debug, PartialEq, Eq)]
pub struct Accounts {
    pub passwd: String,
    pub group: String,
    /// Every account locked: there is no password inside that anyone could know.
    pub shadow: String,
}

/// Reduces the host's `passwd` and `group`. Lines that do not parse are left out.
pub fn reduce(passwd: &str, group: &str, shell: &str) -> Accounts {
    let mut out = Accounts { passwd: String::new(), group: String::new(), shadow: String::new() };
    let mut names = vec!["root", USER];
    account(&mut out, &format!("root:x:0:0:root:/root:{shell}"));
    for line in passwd.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, login] = fields[..] else { continue };
        let (Ok(uid), Ok(gid)) = (uid.parse::<u32>(), gid.parse::<u32>()) else { continue };
        if uid == 0 || !is_system(uid) || !is_system(gid) || !is_name(name) || names.contains(&name) {
            continue;
        }
        names.push(name);
        account(&mut out, &format!("{name}:x:{uid}:{gid}:{name}:{home}:{login}"));
    }
    account(&mut out, &format!("{USER}:x:{USER_ID}:{USER_ID}:{USER}:/home/{USER}:{shell}"));

    let mut groups = vec!["root", USER];
    out.group.push_str("root:x:0:\n");
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, gid, members] = fields[..] else { continue };
        let Ok(gid) = gid.parse::<u32>() else { continue };
        if gid == 0 || !is_system(gid) || !is_name(name) || groups.contains(&name) {
            continue;
        }
        groups.push(name);
        let members: Vec<&str> = members.split(',').filter(|&who| who != USER && names.contains(&who)).collect();
        let _ = writeln!(out.group, "{name}:x:{gid}:{}", members.join(","));
    }
    let _ = writeln!(out.group, "{USER}:x:{USER_ID}:");
    out
}

fn account(out: &mut Accounts, line: &str) {
    let name = line.split(':').next().unwrap_or_default();
    let _ = writeln!(out.passwd, "{line}");
    let _ = writeln!(out.shadow, "{name}:*:19000:0:99999:7:::");
}

fn is_system(id: u32) -> bool {
    id < FIRST_PERSON || id == NOBODY
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(['+', '-'])
        && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_system_accounts_and_drops_people_and_hashes() {
        let passwd = "root:$6$hash:0:0:The Boss:/root:/bin/zsh\ntoor:x:0:0::/root:/bin/sh\n\
                      daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\nalice:x:1001:1001:Alice A:/home/alice:/bin/bash\n\
                      user:x:500:500::/srv/u:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n\
                      +@ldap::::::\nbroken line\n";
        let group = "root:x:0:\nsudo:x:27:alice,daemon\nalice:x:1001:\nnogroup:x:65534:\n";
        let out = reduce(passwd, group, "/bin/bash");
        assert_eq!(
            out.passwd,
            "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n\
             nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
        );
        assert_eq!(out.group, "root:x:0:\nsudo:x:27:daemon\nnogroup:x:65534:\nuser:x:1000:\n");
        assert!(out.shadow.lines().all(|line| line.split(':').nth(1) == Some("*")));
        assert!(!format!("{out:?}").contains("alice"));
    }
}
