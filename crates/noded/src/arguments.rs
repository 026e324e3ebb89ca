//! noded's command line.

use std::{net::SocketAddr, path::PathBuf};

use crate::images::Marks;

pub const USAGE: &str = "\
usage: noded --state-dir DIR --data-listen ADDRESS:PORT [options]

  --state-dir DIR          where sandboxes, images and sockets live; one noded a directory
  --data-listen ADDR:PORT  where the data gateway listens (port 0: any; DIR/noded.json says which)
  --domain DOMAIN          also route by host names {port}-{id}.DOMAIN
  --sandboxd PATH          the daemon for sandboxes (default: sandboxd beside this program)
  --max-starting N         how many sandboxes start at the same time (default: twice the cores)
  --max-warm N             how many sandboxes are made ahead, at most (default: 4; 0: none)
  --registries FILE        a registries.conf with mirrors and insecure registries (default: the machine's, if it has one)
  --image-high-water PCT   above this share of the disk, unused images that can be had again go (default: 85; 100: never)
  --image-low-water PCT    until no more than this is used (default: 80)
  --parent-death           end, with all sandboxes, when the parent process dies
  --ephemeral              remove the state directory at the end (with --parent-death)";

/// What noded was told to do.
#[derive(Debug, Clone)]
pub struct Arguments {
    pub state_dir: PathBuf,
    pub data_listen: SocketAddr,
    pub domain: Option<String>,
    pub sandboxd: PathBuf,
    pub max_starting: usize,
    pub max_warm: usize,
    pub registries: Option<PathBuf>,
    pub marks: Marks,
    pub parent_death: bool,
    pub ephemeral: bool,
}

impl Arguments {
    /// Parses the words after the program's name. The error is for a person.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let (mut state_dir, mut data_listen, mut domain, mut sandboxd, mut max_starting, mut max_warm) =
            (None, None, None, None, None, None);
        let (mut parent_death, mut ephemeral) = (false, false);
        let (mut registries, mut marks) = (None, Marks::default());
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value\n\n{USAGE}"));
            match word.as_str() {
                "--state-dir" => state_dir = Some(PathBuf::from(value()?)),
                "--data-listen" => {
                    let text = value()?;
                    let address = text.parse().map_err(|_| format!("--data-listen: {text:?} is not ADDRESS:PORT"))?;
                    data_listen = Some(address);
                }
                "--domain" => domain = Some(value()?),
                "--sandboxd" => sandboxd = Some(PathBuf::from(value()?)),
                "--max-starting" => {
                    let text = value()?;
                    let number = text.parse().ok().filter(|number| (1..=1024).contains(number));
                    max_starting = Some(number.ok_or_else(|| format!("--max-starting: {text:?} is not in 1..1024"))?);
                }
                "--max-warm" => {
                    let text = value()?;
                    let number = text.parse().ok().filter(|number| (0..=1024).contains(number));
                    max_warm = Some(number.ok_or_else(|| format!("--max-warm: {text:?} is not in 0..1024"))?);
                }
                "--registries" => registries = Some(PathBuf::from(value()?)),
                "--image-high-water" => marks.high_percent = percent(&word, &value()?)?,
                "--image-low-water" => marks.low_percent = percent(&word, &value()?)?,
                "--parent-death" => parent_death = true,
                "--ephemeral" => ephemeral = true,
                _ => return Err(format!("unknown argument {word:?}\n\n{USAGE}")),
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self {
            state_dir: absolute(&state_dir.ok_or(USAGE)?)?,
            data_listen: data_listen.ok_or(USAGE)?,
            domain,
            sandboxd: absolute(&sandboxd.map_or_else(beside_us, Ok)?)?,
            max_starting: max_starting.unwrap_or(2 * cores),
            max_warm: max_warm.unwrap_or(4),
            registries: registries.map(|path| absolute(&path)).transpose()?,
            marks,
            parent_death,
            ephemeral,
        })
    }
}

fn percent(word: &str, text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=100.0).contains(number));
    number.ok_or_else(|| format!("{word}: {text:?} is not between 0 and 100"))
}

fn absolute(path: &std::path::Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn beside_us() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))?;
    Ok(own.with_file_name("sandboxd"))
}

#[cfg(test)]
mod tests {
    use super::Arguments;

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split(' ').map(str::to_owned))
    }

    #[test]
    fn a_full_line() {
        let line =
            "--state-dir /s --data-listen 127.0.0.1:0 --domain a.b --sandboxd /x --max-starting 3 --parent-death";
        let arguments = parse(line).unwrap();
        assert_eq!(arguments.max_starting, 3);
        assert!(arguments.parent_death && !arguments.ephemeral);
        assert_eq!(arguments.sandboxd, std::path::Path::new("/x"));
    }

    #[test]
    fn mistakes_are_said() {
        assert!(parse("--state-dir /s").is_err());
        assert!(parse("--data-listen x --state-dir /s").unwrap_err().contains("ADDRESS:PORT"));
        assert!(parse("--what").unwrap_err().contains("--what"));
        assert!(parse("--state-dir").unwrap_err().contains("needs a value"));
    }
}
