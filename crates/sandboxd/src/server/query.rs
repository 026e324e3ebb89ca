//! Query strings.

use sandmill_wire::ApiError;

/// The decoded parameters of a request's query string.
pub struct Query(Vec<Parameter>);

struct Parameter {
    name: String,
    bytes: Vec<u8>,
    /// What of it isn't UTF-8 is U+FFFD.
    text: String,
}

impl Query {
    pub fn of(uri: &http::Uri) -> Self {
        let pairs = uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| {
                    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                    let bytes = decode(value);
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    Parameter { name: String::from_utf8_lossy(&decode(name)).into_owned(), bytes, text }
                })
                .collect(),
        )
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.find(name).map(|parameter| parameter.text.as_str())
    }

    /// The parameter's exact bytes, for paths.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.find(name).map(|parameter| parameter.bytes.as_slice())
    }

    fn find(&self, name: &str) -> Option<&Parameter> {
        self.0.iter().find(|parameter| parameter.name == name)
    }

    /// A whole number, or None when absent. Errors: 400 `invalid_argument`.
    pub fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            ApiError::new(400, "invalid_argument", format!("the query parameter {name} is not a whole number: {text}"))
        })
    }

    /// `1`/`true` or `0`/`false`; `default` when absent. Errors: 400 `invalid_argument`.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(default),
            Some("1" | "true") => Ok(true),
            Some("0" | "false") => Ok(false),
            Some(other) => Err(ApiError::new(
                400,
                "invalid_argument",
                format!("the query parameter {name} is {other}, not 0 or 1"),
            )),
        }
    }
}

/// Percent-decoding; `+` is a blank, as clients write it in queries.
fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = |index: usize| bytes.get(index).and_then(|byte| (*byte as char).to_digit(16));
        match (bytes[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            (b'+', _, _) => {
                out.push(b' ');
                at += 1;
            }
            (byte, _, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let query = Query::of(&"/x?path=%2Ftmp%2Fa%20b+c&n=7&eof=1&bad=%zz".parse().unwrap());
        assert_eq!(query.get("path"), Some("/tmp/a b c"));
        assert_eq!(query.number("n").unwrap(), Some(7));
        assert!(query.flag("eof", false).unwrap());
        assert_eq!(query.get("bad"), Some("%zz"));
        assert_eq!(query.get("none"), None);
        assert_eq!(Query::of(&"/x?path=%ff".parse().unwrap()).bytes("path"), Some(&[0xff][..]));
    }
}
