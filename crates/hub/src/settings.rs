//! Finds the caches and settings the same way as the programs that own them. Environment variables are read
//! through a function, so that tests can supply them.
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Model caches of this machine. They need not exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Hugging Face's cache, where downloads are stored: `$HF_HUB_CACHE`, `$HF_HOME/hub`,
    /// `~/.cache/huggingface/hub`.
    pub hugging_face: PathBuf,
    /// llama.cpp's cache: `$LLAMA_CACHE`, or `llama.cpp` in the user's cache folder.
    pub llama_cpp: Option<PathBuf>,
    /// LM Studio's folders: `~/.lmstudio/models`, and the older `~/.cache/lm-studio/models`.
    pub lm_studio: Vec<PathBuf>,
    /// Ollama's folders: `$OLLAMA_MODELS`, or `~/.ollama/models` and the folder of its Linux service.
    pub ollama: Vec<PathBuf>,
}

#[derive(Clone, Debug)]
pub struct Settings {
    pub places: Places,
    /// `https://huggingface.co`, or a mirror; without a trailing slash.
    pub endpoint: String,
    pub token: Option<String>,
    /// Send no requests.
    pub offline: bool,
    /// Use the proxy named by the environment.
    pub proxy: bool,
    /// A PEM file of root certificates to trust instead of Mozilla's.
    pub certificates: Option<PathBuf>,
    /// Returns the free bytes of the disk of a folder, if the system reports them.
    pub free_bytes: fn(&Path) -> Option<u64>,
    /// Pause after the first failed request; grows with each further failure.
    pub pause: Duration,
    /// Read and write timeout: a connection that transfers nothing for this long is broken.
    pub patience: Duration,
}

impl Settings {
    /// Reads the settings through `variable`, which behaves like [`std::env::var_os`]. An empty variable counts
    /// as unset.
    pub fn from_env(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let home = path("HOME").or_else(|| path("USERPROFILE")).unwrap_or_default();
        let cache = path("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache"));
        let tilde = |path: PathBuf| match path.strip_prefix("~") {
            Ok(rest) => home.join(rest),
            Err(_) => path,
        };

        let hf_home = path("HF_HOME").map_or_else(|| cache.join("huggingface"), tilde);
        let hub = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token = || {
            let file = path("HF_TOKEN_PATH").map_or_else(|| hf_home.join("token"), tilde);
            std::fs::read_to_string(file).ok()
        };
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(token);
        let own_cache = if cfg!(target_os = "macos") {
            home.join("Library/Caches")
        } else if cfg!(windows) {
            path("LOCALAPPDATA").unwrap_or_else(|| cache.clone())
        } else {
            cache.clone()
        };
        // LM Studio records the location of its folder here if the user moved it.
        let pointer = std::fs::read_to_string(home.join(".lmstudio-home-pointer")).ok();
        let lm_studio = pointer.map_or_else(|| home.join(".lmstudio"), |at| PathBuf::from(at.trim()));
        let ollama = match path("OLLAMA_MODELS") {
            Some(folder) => vec![folder],
            None => vec![home.join(".ollama/models"), "/usr/share/ollama/.ollama/models".into()],
        };
        let says_yes = |name: &str| {
            text(name).is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_lowercase().as_str()))
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Settings {
            places: Places {
                hugging_face: hub.map_or_else(|| hf_home.join("hub"), tilde),
                llama_cpp: Some(path("LLAMA_CACHE").unwrap_or_else(|| own_cache.join("llama.cpp"))),
                lm_studio: vec![lm_studio.join("models"), home.join(".cache/lm-studio/models")],
                ollama,
            },
            endpoint: endpoint.trim_end_matches('/').into(),
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            offline: says_yes("HF_HUB_OFFLINE") || says_yes("TRANSFORMERS_OFFLINE"),
            proxy: true,
            certificates: path("SSL_CERT_FILE").or_else(|| path("REQUESTS_CA_BUNDLE")),
            free_bytes,
            pause: Duration::from_secs(1),
            patience: Duration::from_secs(60),
        }
    }
}

/// Free bytes on the disk of `folder`. The folder need not exist yet.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    #[cfg(unix)]
    {
        let disk = nix::sys::statvfs::statvfs(there).ok()?;
        // The field types differ between systems.
        #[allow(clippy::unnecessary_cast)]
        (disk.blocks_available() as u64).checked_mul(disk.fragment_size() as u64)
    }
    #[cfg(not(unix))]
    {
        let _ = there;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from_env(&|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn caches_are_where_their_programs_look() {
        let plain = settings(&[("HOME", "/home/ann"), ("HF_TOKEN", "")]);
        assert_eq!(plain.places.hugging_face, Path::new("/home/ann/.cache/huggingface/hub"));
        assert_eq!(
            plain.places.lm_studio,
            ["/home/ann/.lmstudio/models", "/home/ann/.cache/lm-studio/models"].map(PathBuf::from)
        );
        assert_eq!(plain.places.ollama[0], Path::new("/home/ann/.ollama/models"));
        assert_eq!(
            (plain.endpoint.as_str(), plain.token, plain.offline),
            ("https://huggingface.co", None, false)
        );
        if cfg!(target_os = "linux") {
            assert_eq!(plain.places.llama_cpp.unwrap(), Path::new("/home/ann/.cache/llama.cpp"));
        }

        let moved = settings(&[
            ("HOME", "/home/ann"),
            ("XDG_CACHE_HOME", "/cache"),
            ("HF_HOME", "~/hf"),
            ("LLAMA_CACHE", "/llama"),
            ("OLLAMA_MODELS", "/ollama"),
            ("HF_ENDPOINT", "http://mirror/"),
            ("HF_TOKEN", " hf_x\n"),
            ("HF_HUB_OFFLINE", "True"),
        ]);
        assert_eq!(moved.places.hugging_face, Path::new("/home/ann/hf/hub"));
        assert_eq!(moved.places.llama_cpp.unwrap(), Path::new("/llama"));
        assert_eq!(moved.places.ollama, [PathBuf::from("/ollama")]);
        assert_eq!((moved.endpoint.as_str(), moved.token.as_deref()), ("http://mirror", Some("hf_x")));
        assert!(moved.offline);
        let hub = settings(&[("HOME", "/h"), ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/hub")]);
        assert_eq!(hub.places.hugging_face, Path::new("/hub"));
        assert!(!settings(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).offline);
    }

    #[test]
    fn a_token_is_read_from_its_file() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let hf_home = home.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", hf_home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(
            settings(&[("HF_HOME", hf_home), ("HF_TOKEN", "hf_env")]).token.as_deref(),
            Some("hf_env")
        );
    }

    #[test]
    fn a_folder_that_is_yet_to_be_made_has_a_disk() {
        let folder = tempfile::tempdir().unwrap();
        let below = free_bytes(&folder.path().join("not/there"));
        assert_eq!(below.is_some(), cfg!(unix));
        assert_ne!(below, Some(0));
    }
}
