//! Ollama's folder. Each name has a manifest, `manifests/HOST/NAMESPACE/MODEL/TAG` (or the same below
//! `manifests-v2`), which refers to blobs by hash. The models are GGUF files without the file extension.
use super::{Found, bytes_of, folders, names, not_there};
use crate::name::is_safe_path;
use crate::{Error, Places, Resolved};
use serde::Deserialize;
use std::io::Read;
use std::path::{Path, PathBuf};

const STORE: &str = "ollama";
const HOST: &str = "registry.ollama.ai";
const NAMESPACE: &str = "library";
const TAG: &str = "latest";
const TREES: [&str; 2] = ["manifests-v2", "manifests"];
const MODEL: &str = "application/vnd.ollama.image.model";

#[derive(Deserialize)]
struct Manifest {
    #[serde(default)]
    config: Option<Layer>,
    #[serde(default)]
    layers: Vec<Layer>,
    /// Present if the name stands for several variants of a model.
    #[serde(default)]
    manifests: Vec<Manifest>,
    /// Set if the variant's own manifest is stored in a separate blob.
    #[serde(default)]
    digest: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    #[serde(default)]
    media_type: String,
    #[serde(default)]
    digest: String,
}

/// The config blob of a manifest.
#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    file_type: Option<String>,
}

/// Limit on the size of manifests and config blobs, in bytes.
const MAX_BYTES: u64 = 4 << 20;

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, String> {
    let file = std::fs::File::open(path).map_err(|e| e.to_string())?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    serde_json::from_slice(&bytes).map_err(|e| e.to_string())
}

/// The path of a blob. Accepts only a SHA-256 digest, so that a manifest cannot name other files.
fn blob(models: &Path, digest: &str) -> Option<PathBuf> {
    let hex = digest.strip_prefix("sha256:").or_else(|| digest.strip_prefix("sha256-"))?;
    let is_hash = hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| models.join("blobs").join(format!("sha256-{}", hex.to_lowercase())))
}

/// The weight file of a manifest, and its quantisation.
fn weights(models: &Path, manifest: &Path) -> Result<(PathBuf, Option<String>), String> {
    let whole: Manifest = read(manifest).map_err(|e| format!("its manifest cannot be read: {e}"))?;
    let mut forms = vec![whole];
    let several = std::mem::take(&mut forms[0].manifests);
    for form in several {
        let elsewhere = form.digest.as_ref().filter(|_| form.layers.is_empty());
        match elsewhere.and_then(|digest| blob(models, digest)) {
            Some(path) => forms.extend(read::<Manifest>(&path).ok()),
            None => forms.push(form),
        }
    }
    let found = forms.iter().find_map(|form| {
        let mut models = form.layers.iter().filter(|layer| layer.media_type == MODEL);
        let model = models.next()?;
        Some((form, model, models.next().is_none()))
    });
    let (form, model, alone) = found.ok_or("its weights are not in one GGUF file")?;
    if !alone {
        return Err("its weights are in several files".into());
    }
    let path = blob(models, &model.digest).ok_or("its manifest names an invalid blob")?;
    let config = form.config.as_ref().and_then(|config| blob(models, &config.digest));
    let config: Config = config.and_then(|path| read(&path).ok()).unwrap_or_default();
    match path.is_file() {
        true => Ok((path, config.file_type)),
        false => Err("its weights are missing: an incomplete download".into()),
    }
}

/// All names as `ollama list` prints them, each with its manifest.
fn manifests(models: &Path) -> Vec<(String, PathBuf)> {
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for tree in TREES {
        let tree = models.join(tree);
        for host in folders(&tree) {
            for namespace in folders(&tree.join(&host)) {
                for model in folders(&tree.join(&host).join(&namespace)) {
                    let folder = tree.join(&host).join(&namespace).join(&model);
                    for tag in names(&folder, Path::is_file) {
                        let prefix = match (host.as_str(), namespace.as_str()) {
                            (HOST, NAMESPACE) => String::new(),
                            (HOST, namespace) => format!("{namespace}/"),
                            (host, namespace) => format!("{host}/{namespace}/"),
                        };
                        let name = format!("{prefix}{model}:{tag}");
                        if !found.iter().any(|(known, _)| *known == name) {
                            found.push((name, folder.join(&tag)));
                        }
                    }
                }
            }
        }
    }
    found.sort();
    found
}

pub(super) fn list(models: &Path) -> Vec<Found> {
    let found = |(name, manifest): (String, PathBuf)| {
        let name = format!("ollama:{name}");
        match weights(models, &manifest) {
            Ok((path, quant)) => {
                Found { name, store: STORE, bytes: bytes_of(&path), path, quant, trouble: None }
            }
            Err(trouble) => {
                Found { name, store: STORE, path: manifest, bytes: 0, quant: None, trouble: Some(trouble) }
            }
        }
    };
    manifests(models).into_iter().map(found).collect()
}

pub(crate) fn resolve(places: &Places, typed: &str) -> Result<Resolved, Error> {
    let name = format!("ollama:{typed}");
    let (path, tag) = match typed.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, tag),
        _ => (typed, TAG),
    };
    let parts: Vec<&str> = path.split('/').collect();
    let (host, namespace, model) = match parts[..] {
        [model] => (HOST, NAMESPACE, model),
        [namespace, model] => (HOST, namespace, model),
        [host, namespace, model] => (host, namespace, model),
        _ => ("", "", ""),
    };
    let below = format!("{host}/{namespace}/{model}/{tag}");
    for models in places.ollama.iter().filter(|_| is_safe_path(&below)) {
        let mut manifests = TREES.iter().map(|tree| models.join(tree).join(&below));
        if let Some(manifest) = manifests.find(|manifest| manifest.is_file()) {
            let (path, _) = weights(models, &manifest)
                .map_err(|what| Error::Answer { what: format!("{name} cannot be run: {what}") })?;
            return Ok(Resolved { path, title: Some(typed.into()) });
        }
    }
    let known = places.ollama.iter().flat_map(|models| manifests(models)).map(|(name, _)| name);
    Err(not_there(name, STORE, typed, known))
}
