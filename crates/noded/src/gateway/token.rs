//! Who may ask: the sandbox's access token, or a URL signed with it.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{engine::general_purpose::STANDARD_NO_PAD, Engine as _};
use http::{header::AUTHORIZATION, request::Parts, HeaderMap, Method};
use sandmill_wire::ApiError;
use sha2::{Digest, Sha256};

/// Headers that may carry the token; the last is what E2B's clients send to user's ports.
pub const HEADERS: [&str; 2] = ["x-access-token", "e2b-traffic-access-token"];

/// Errors: 401 `token_missing`, `token_wrong`, `signature_wrong`, `signature_expired`.
pub fn check(request: &Parts, to_sandboxd: bool, token: &str) -> Result<(), ApiError> {
    let given = HEADERS.iter().filter_map(|name| request.headers.get(*name)).map(|value| value.as_bytes());
    let mut any = false;
    for candidate in given.chain(bearer(&request.headers)) {
        if same(candidate, token.as_bytes()) {
            return Ok(());
        }
        any = true;
    }
    if any {
        return Err(ApiError::new(401, "token_wrong", "this access token is not the one of the sandbox")
            .hint("a token belongs to one sandbox; the create's answer has it"));
    }
    if to_sandboxd && request.uri.path() == "/files" {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if let Some(signed) = Signed::of(&request.method, request.uri.query().unwrap_or_default()) {
            return signed.check(token, now);
        }
    }
    Err(ApiError::new(401, "token_missing", "the request carries no access token")
        .hint("send it as X-Access-Token or as Authorization: Bearer; the create's answer has it"))
}

/// The token of `Authorization: Bearer`; other schemes are the user's own.
pub fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// Compares in a time that depends on the lengths only.
fn same(given: &[u8], expected: &[u8]) -> bool {
    let differences = given.iter().zip(expected).fold(0, |seen, (a, b)| std::hint::black_box(seen | (a ^ b)));
    // An empty token opens nothing.
    !expected.is_empty() && given.len() == expected.len() && differences == 0
}

/// E2B's signed URL: `signature` is `v1_` + base64(sha256("path:operation:user:token[:expiration]")).
struct Signed {
    operation: &'static str,
    path: String,
    user: String,
    signature: String,
    expiration: Option<String>,
}

impl Signed {
    fn of(method: &Method, query: &str) -> Option<Self> {
        let operation = match *method {
            Method::GET | Method::HEAD => "read",
            Method::POST | Method::PUT => "write",
            _ => return None,
        };
        let mut signed =
            Self { operation, path: String::new(), user: String::new(), signature: String::new(), expiration: None };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "path" => signed.path = value.into_owned(),
                "username" => signed.user = value.into_owned(),
                // Some clients leave base64's plus sign as it is, which form decoding turns into a space.
                "signature" => signed.signature = value.replace(' ', "+"),
                "signature_expiration" => signed.expiration = Some(value.into_owned()),
                _ => {}
            }
        }
        (!signed.signature.is_empty()).then_some(signed)
    }

    fn check(&self, token: &str, now: u64) -> Result<(), ApiError> {
        let mut text = format!("{}:{}:{}:{token}", self.path, self.operation, self.user);
        if let Some(expiration) = &self.expiration {
            text.push(':');
            text.push_str(expiration);
        }
        let expected = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())));
        if token.is_empty() || !same(self.signature.trim_end_matches('=').as_bytes(), expected.as_bytes()) {
            return Err(ApiError::new(
                401,
                "signature_wrong",
                "the URL's signature does not fit its path, user and expiry",
            )
            .hint("use the URL as it was made; its parts cannot be changed"));
        }
        match self.expiration.as_deref().map(str::parse::<u64>) {
            None => Ok(()),
            Some(Ok(until)) if until >= now => Ok(()),
            Some(_) => {
                Err(ApiError::new(401, "signature_expired", "the signed URL has expired").hint("make a new one"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From E2B's `get_signature("/home/user/a b", "read", "user", "secret", …)`.
    const PLAIN: &str = "v1_GBJwF64PEcfRmgyeRZXoGLi5wQhVlg/8mFyKqRsVxrA";
    const UNTIL_2000000000: &str = "v1_Zqp6BVZWu66mMN7g7YtDG/E/yXsEa1m+ATk1borAUkQ";

    fn signed(method: Method, query: &str) -> Result<(), ApiError> {
        Signed::of(&method, query).unwrap().check("secret", 1_900_000_000)
    }

    fn query(signature: &str, more: &str) -> String {
        let escaped: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
        format!("path=%2Fhome%2Fuser%2Fa+b&username=user&signature={escaped}{more}")
    }

    #[test]
    fn signatures_of_e2b() {
        signed(Method::GET, &query(PLAIN, "")).unwrap();
        signed(Method::GET, &query(UNTIL_2000000000, "&signature_expiration=2000000000")).unwrap();
        assert_eq!(signed(Method::POST, &query(PLAIN, "")).unwrap_err().code, "signature_wrong");
        let later = signed(Method::GET, &query(UNTIL_2000000000, "&signature_expiration=2100000000"));
        assert_eq!(later.unwrap_err().code, "signature_wrong");
        assert!(Signed::of(&Method::GET, "path=x").is_none());
        assert!(Signed::of(&Method::DELETE, &query(PLAIN, "")).is_none());
    }

    #[test]
    fn an_expired_signature() {
        let signature = Signed::of(&Method::GET, &query(UNTIL_2000000000, "&signature_expiration=2000000000")).unwrap();
        assert_eq!(signature.check("secret", 2_000_000_001).unwrap_err().code, "signature_expired");
    }

    fn headers(name: &str, value: &str) -> Result<(), ApiError> {
        check(&http::Request::get("/x").header(name, value).body(()).unwrap().into_parts().0, true, "secret")
    }

    #[test]
    fn tokens_in_headers() {
        headers("x-access-token", "secret").unwrap();
        headers("authorization", "bearer secret").unwrap();
        headers("e2b-traffic-access-token", "secret").unwrap();
        assert_eq!(headers("x-access-token", "secreT").unwrap_err().code, "token_wrong");
        assert_eq!(headers("x-access-token", "").unwrap_err().code, "token_wrong");
        assert_eq!(headers("authorization", "Basic dXNlcjo=").unwrap_err().code, "token_missing");
    }

    #[test]
    fn an_empty_token_opens_nothing() {
        assert!(!same(b"", b""));
    }
}
