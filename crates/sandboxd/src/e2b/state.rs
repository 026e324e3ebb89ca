//! What E2B's calls share: the defaults that `/init` sets, and watchers.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use http::{header, HeaderMap};
use sandmill_wire::{ApiError, SandboxdConfig};

use super::{failure::Failure, host::Meter, process_messages::ProcessConfig, watchers::Watchers};
use crate::{
    app::App,
    files::{owner, path::Base, path::WirePath, place::Owner},
    proc::{Account, Process},
};

/// Processes that E2B's calls started, with what they were asked to run.
type Started = Vec<(std::rc::Weak<Process>, ProcessConfig)>;

#[derive(Default)]
pub struct State {
    defaults: RefCell<Defaults>,
    pub watchers: Watchers,
    pub meter: Meter,
    started: RefCell<Started>,
}

/// Defaults of E2B's calls.
#[derive(Debug, Clone, Default)]
pub struct Defaults {
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
}

impl State {
    pub fn new(config: &SandboxdConfig) -> Self {
        let defaults = Defaults { env: BTreeMap::new(), user: config.user.clone(), workdir: config.workdir.clone() };
        Self { defaults: RefCell::new(defaults), ..Self::default() }
    }

    pub fn defaults(&self) -> Defaults {
        self.defaults.borrow().clone()
    }

    pub fn change_defaults(&self, change: impl FnOnce(&mut Defaults)) {
        change(&mut self.defaults.borrow_mut());
    }

    pub fn remember(&self, process: &std::rc::Rc<Process>, config: ProcessConfig) {
        let mut started = self.started.borrow_mut();
        started.retain(|(process, _)| process.strong_count() > 0);
        started.push((std::rc::Rc::downgrade(process), config));
    }

    /// What a process was asked to run.
    pub fn config_of(&self, process: &std::rc::Rc<Process>) -> ProcessConfig {
        let started = self.started.borrow();
        let known = started.iter().find(|(known, _)| std::ptr::eq(known.as_ptr(), std::rc::Rc::as_ptr(process)));
        known.map_or_else(
            || {
                let about = process.about();
                ProcessConfig {
                    cmd: about.argv.first().cloned().unwrap_or_default(),
                    args: about.argv.iter().skip(1).cloned().collect(),
                    envs: BTreeMap::new(),
                    cwd: Some(about.cwd.clone()),
                }
            },
            |(_, config)| config.clone(),
        )
    }
}

/// Who makes a call, as E2B sees it.
pub struct Caller {
    pub account: Account,
    workdir: Option<String>,
}

impl Caller {
    /// The account `user`, else the default one. Errors: 400 `user_not_found`.
    pub fn named(app: &App, user: Option<&str>) -> Result<Self, ApiError> {
        let Defaults { user: default, workdir, .. } = app.e2b.defaults();
        let user = user.filter(|user| !user.is_empty()).or(default.as_deref()).unwrap_or("root");
        Ok(Self { account: app.procs.accounts().resolve(user)?, workdir })
    }

    /// The user of a Connect call: the name in `Authorization: Basic`, whose password is ignored.
    pub fn of(app: &App, headers: &HeaderMap) -> Result<Self, Failure> {
        let name = headers.get(header::AUTHORIZATION).and_then(|value| basic_user(value.as_bytes()));
        Ok(Self::named(app, name.as_deref())?)
    }

    pub fn owner(&self) -> Owner {
        owner(&self.account)
    }

    /// An absolute path: an empty one is the working directory, a relative one begins in the user's home.
    ///
    /// Errors: 400 `invalid_argument`, `path_too_long`.
    pub fn path(&self, given: impl Into<Vec<u8>>) -> Result<PathBuf, ApiError> {
        let home = PathBuf::from(&self.account.home);
        let base = Base { home: home.clone(), start: home.clone() };
        let mut given: Vec<u8> = given.into();
        if given.is_empty() {
            match &self.workdir {
                Some(workdir) => given = workdir.clone().into_bytes(),
                None => return Ok(home),
            }
        }
        let absolute = given.first() == Some(&b'/');
        let path = WirePath::new(given).resolve(&base)?;
        Ok(if absolute { path } else { cleaned(&path) })
    }
}

/// The path without `.` and `..`, by its text alone, as E2B's clients get it back.
fn cleaned(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut clean, component| {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
        clean
    })
}

fn basic_user(value: &[u8]) -> Option<String> {
    use base64::{engine::general_purpose::STANDARD, Engine as _};
    let (scheme, credentials) = (value.get(..6)?, value.get(6..)?);
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(credentials.trim_ascii()).ok()?).ok()?;
    decoded.split_once(':').map(|(user, _)| user.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn basic_credentials_name_a_user() {
        assert_eq!(basic_user(b"Basic dXNlcjo=").as_deref(), Some("user"));
        assert_eq!(basic_user(b"basic cm9vdDpwdw==").as_deref(), Some("root"));
        assert_eq!(basic_user(b"Bearer x"), None);
        assert_eq!(basic_user(b"Basic ?"), None);
    }

    #[test]
    fn relative_paths_begin_at_home() {
        let account = Account { uid: 1, gid: 1, groups: vec![], name: "user".into(), home: "/home/user".into() };
        let caller = |workdir: Option<&str>| Caller { account: account.clone(), workdir: workdir.map(str::to_owned) };
        let path = |given: &str| caller(None).path(given).unwrap();
        assert_eq!(path("a/../b/./c"), Path::new("/home/user/b/c"));
        assert_eq!(path("~/x"), Path::new("/home/user/x"));
        assert_eq!(path("/a/../b"), Path::new("/a/../b"));
        assert_eq!(path(""), Path::new("/home/user"));
        assert_eq!(caller(Some("/app")).path("").unwrap(), Path::new("/app"));
        assert_eq!(caller(Some("app")).path("").unwrap(), Path::new("/home/user/app"));
    }
}
