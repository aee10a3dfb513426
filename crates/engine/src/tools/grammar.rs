//! Builds the grammar that forces a model to call a tool, in the format it was trained on.
//!
//! If the format writes arguments as a JSON object, the tool's schema is the grammar. Pythonic and Qwen3-Coder
//! calls write each argument separately, in the order of the schema, so each argument gets a grammar from its
//! own schema. Constraints on the object as a whole, or on a string without quotes, that such a grammar cannot
//! express are rejected with their path.
use super::qwen_coder::PARAMETER_END;
use super::{TOOL_CALL, TOOL_CALL_END, Tool, ToolChoice, ToolFormat, harmony};
use crate::grammar::{Grammar, InvalidParameter, Schema};
use serde_json::{Map, Value};

impl ToolChoice {
    /// The grammar that enforces this choice; `None` if nothing needs to be enforced. `parallel` permits
    /// several calls if the format supports them. Llama 3 and Harmony always make one call; Llama 3's template
    /// takes one call per turn. Fails if a schema cannot be enforced in the format.
    pub fn grammar(
        &self,
        format: ToolFormat,
        tools: &[Tool],
        parallel: bool,
    ) -> Result<Option<Grammar>, InvalidParameter> {
        let chosen: Vec<&Tool> = match self {
            ToolChoice::None | ToolChoice::Auto => return Ok(None),
            ToolChoice::Required => tools.iter().collect(),
            ToolChoice::Named(name) => tools.iter().filter(|tool| tool.name == *name).collect(),
        };
        if format == ToolFormat::Harmony {
            return Ok(Some(harmony::calls(chosen)));
        }
        let parallel = parallel && *self == ToolChoice::Required;
        let start = match (format, parallel) {
            (ToolFormat::Llama3 | ToolFormat::Harmony, _)
            | (ToolFormat::Hermes | ToolFormat::Qwen3Coder, false) => "call",
            (ToolFormat::Hermes | ToolFormat::Qwen3Coder, true) => "call (\"\\n\" call)*",
            (ToolFormat::Pythonic, false) => "\"[\" call \"]\"",
            (ToolFormat::Pythonic, true) => "\"[\" call (\", \" call)* \"]\"",
        };
        let names: Vec<String> = (0..chosen.len()).map(|at| format!("call_{at}")).collect();
        let mut grammar = Grammar::new(format!("start: {start}\ncall: {}\n", names.join(" | ")));
        for (at, tool) in chosen.into_iter().enumerate() {
            grammar = match format {
                ToolFormat::Llama3 | ToolFormat::Hermes | ToolFormat::Harmony => {
                    json(grammar, format, at, tool)
                }
                ToolFormat::Pythonic => pythonic(grammar, at, tool)?,
                ToolFormat::Qwen3Coder => qwen_coder(grammar, at, tool)?,
            };
        }
        Ok(Some(match format {
            ToolFormat::Llama3 | ToolFormat::Pythonic | ToolFormat::Harmony => grammar,
            ToolFormat::Hermes | ToolFormat::Qwen3Coder => {
                grammar.mark("call_begin", TOOL_CALL).mark("call_end", TOOL_CALL_END)
            }
        }))
    }
}

/// A string literal in Lark syntax. Tool names need no escapes: `tools_from_json` rejects those that would.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn json(mut grammar: Grammar, format: ToolFormat, at: usize, tool: &Tool) -> Grammar {
    let name = &tool.name;
    let rule = match format {
        ToolFormat::Hermes => {
            let open = literal(&format!("\n{{\"name\": \"{name}\", \"arguments\": "));
            format!("call_{at}: call_begin {open} args_{at} \"}}\\n\" call_end\n")
        }
        _ => {
            let open = literal(&format!("{{\"name\": \"{name}\", \"parameters\": "));
            format!("call_{at}: {open} args_{at} \"}}\"\n")
        }
    };
    grammar.rule(&rule);
    grammar.with(&format!("args_{at}"), tool.parameters.clone())
}

/// Grammar of `f(a=1, b=2)`. Values are generated as JSON, which the parser accepts as literals.
fn pythonic(mut grammar: Grammar, call: usize, tool: &Tool) -> Result<Grammar, InvalidParameter> {
    let arguments = arguments(tool, &mut grammar.proof_steps)?;
    let n = arguments.len();
    grammar.rule(&format!("call_{call}: {} first_{call}_0 \")\"\n", literal(&format!("{}(", tool.name))));
    // `first`: no argument comes before this one. `more`: one does, so a comma comes between.
    let mut rules = format!("first_{call}_{n}: \"\"\nmore_{call}_{n}: \"\"\n");
    for (at, argument) in arguments.into_iter().enumerate() {
        let named = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = &argument.name;
        if !name.chars().all(named) || name.starts_with(|c: char| c.is_ascii_digit()) || name.is_empty() {
            let what = "is not a valid argument name in Python, the syntax of this model's calls";
            return Err(InvalidParameter::new(&argument.place, what.into()));
        }
        let (next, own) = (at + 1, format!("arg_{call}_{at}"));
        let (first, more) = match argument.required {
            true => (String::new(), format!("\", \" {own}")),
            false => (format!(" | first_{call}_{next}"), format!("(\", \" {own})?")),
        };
        rules += &format!("first_{call}_{at}: {own} more_{call}_{next}{first}\n");
        rules += &format!("more_{call}_{at}: {more} more_{call}_{next}\n");
        rules += &format!("{own}: {} value_{call}_{at}\n", literal(&format!("{name}=")));
        grammar = grammar.with(&format!("value_{call}_{at}"), argument.schema());
    }
    grammar.rule(&rules);
    Ok(grammar)
}

fn qwen_coder(mut grammar: Grammar, call: usize, tool: &Tool) -> Result<Grammar, InvalidParameter> {
    let mut rule = format!("call_{call}: call_begin {}", literal(&format!("\n<function={}>\n", tool.name)));
    let mut rules = String::new();
    for (at, argument) in arguments(tool, &mut grammar.proof_steps)?.into_iter().enumerate() {
        let bad = |what: &str| InvalidParameter::new(&argument.place, what.into());
        if argument.name.contains(|c: char| matches!(c, '<' | '>') || c.is_whitespace()) {
            return Err(bad(
                "has `<`, `>` or white space in its name, which the calls of this model cannot contain",
            ));
        }
        let (open, close) =
            (literal(&format!("<parameter={}>\n", argument.name)), literal(&format!("\n{PARAMETER_END}\n")));
        let own = format!("arg_{call}_{at}");
        rule += &format!(" {own}{}", if argument.required { "" } else { "?" });
        let value = format!("value_{call}_{at}");
        match argument.form().map_err(|what| bad(&what))? {
            Form::Json => {
                rules += &format!("{own}: {open} {value} {close}\n");
                grammar = grammar.with(&value, argument.schema());
            }
            Form::Text { min, max } => {
                // A string without quotes has no escapes, so it ends at the first end mark.
                let max = max.map_or(String::new(), |max| max.to_string());
                let end = literal(PARAMETER_END);
                rules += &format!("{own}: {open} {value} \"\\n\"\n");
                rules += &format!("{value}[suffix={end}]: /(?s:.{{{min},{max}}})\\n/\n");
            }
            Form::OneOf(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                rules += &format!("{own}: {open} ({}) {close}\n", texts.join(" | "));
            }
        }
    }
    rule += " \"</function>\\n\" call_end\n";
    grammar.rule(&rule);
    grammar.rule(&rules);
    Ok(grammar)
}

/// One argument of a tool with its schema.
struct Argument<'t> {
    name: String,
    place: String,
    schema: &'t Value,
    /// Schema of all parameters, which contains the definitions.
    root: &'t Map<String, Value>,
    required: bool,
}

/// Keywords that constrain an object as a whole, except through its properties.
const OF_THE_WHOLE: [&str; 18] = [
    "$ref",
    "allOf",
    "anyOf",
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "oneOf",
    "patternProperties",
    "propertyNames",
    "then",
    "unevaluatedProperties",
];

/// A tool's arguments in the order of its schema.
fn arguments<'t>(tool: &'t Tool, proof_steps: &mut usize) -> Result<Vec<Argument<'t>>, InvalidParameter> {
    // First check that the schema is valid.
    tool.parameters.checked(proof_steps)?;
    let place = tool.parameters.place();
    let Some(root) = tool.schema().as_object() else { return Ok(Vec::new()) };
    if let Some(keyword) = OF_THE_WHOLE.iter().find(|keyword| root.contains_key(**keyword)) {
        let what = "cannot be enforced in the calls of this model, which are written argument by argument: describe \
                    the arguments under `properties`";
        return Err(InvalidParameter::new(&format!("{place}.{keyword}"), what.into()));
    }
    let required: Vec<&str> = root
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let properties = root.get("properties").and_then(Value::as_object);
    if let Some(name) = required.iter().find(|name| properties.is_none_or(|p| !p.contains_key(**name))) {
        let what = format!("requires `{name}`, which is not among the properties");
        return Err(InvalidParameter::new(&format!("{place}.required"), what));
    }
    let mut all = Vec::new();
    for (name, schema) in properties.into_iter().flatten() {
        let place = format!("{place}.properties.{name}");
        let required = required.contains(&name.as_str());
        if schema == &Value::Bool(false) {
            match required {
                true => {
                    return Err(InvalidParameter::new(&place, "accepts no value, but is required".into()));
                }
                false => continue,
            }
        }
        if let Some(to) = reference_to_elsewhere(schema) {
            let what = format!(
                "refers to `{to}`; in the calls of this model, which are written argument by argument, only \
                 references to `#/$defs/…` are followed"
            );
            return Err(InvalidParameter::new(&place, what));
        }
        all.push(Argument { name: name.clone(), place, schema, root, required });
    }
    Ok(all)
}

/// A reference that would be invalid, or mean something else, in a schema of the argument alone.
fn reference_to_elsewhere(schema: &Value) -> Option<&str> {
    match schema {
        Value::Object(fields) => fields.iter().find_map(|(name, value)| match (name.as_str(), value) {
            ("$ref", Value::String(to))
                if !DEFINITIONS.iter().any(|d| to.starts_with(&format!("#/{d}/"))) =>
            {
                Some(to.as_str())
            }
            (_, value) => reference_to_elsewhere(value),
        }),
        Value::Array(items) => items.iter().find_map(reference_to_elsewhere),
        _ => None,
    }
}

const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// How Qwen3-Coder writes a value.
enum Form {
    Json,
    /// A string without quotes, with bounds on its number of characters.
    Text {
        min: u64,
        max: Option<u64>,
    },
    /// One of these strings, without quotes.
    OneOf(Vec<String>),
}

/// Keywords that do not constrain the value.
const NOTES: [&str; 9] =
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id"];

impl Argument<'_> {
    /// The argument's own schema, together with the definitions that it may refer to.
    fn schema(&self) -> Schema {
        let mut own = self.schema.as_object().cloned().unwrap_or_default();
        for name in DEFINITIONS {
            if let Some(definitions) = self.root.get(name)
                && !own.contains_key(name)
            {
                own.insert(name.into(), definitions.clone());
            }
        }
        Schema::new(&self.place, Value::Object(own))
    }

    fn form(&self) -> Result<Form, String> {
        let mut schema = self.schema;
        // Follow a chain of references.
        for _ in 0..16 {
            let to = schema.get("$ref").and_then(Value::as_str);
            let Some(target) = to.and_then(|to| self.schema_at(to)) else { break };
            schema = target;
        }
        let Some(fields) = schema.as_object() else { return Ok(Form::Text { min: 0, max: None }) };
        let says: Vec<&str> = fields
            .keys()
            .map(String::as_str)
            .filter(|name| !NOTES.contains(name) && !DEFINITIONS.contains(name))
            .collect();
        if let Some(values) = values(schema) {
            if !values.iter().any(Value::is_string) {
                return Ok(Form::Json);
            }
            let text = |value: &Value| match value {
                Value::String(text) => Some(text.clone()),
                Value::Null => Some("null".into()),
                _ => None,
            };
            let texts: Option<Vec<String>> = values.iter().map(text).collect();
            return match texts {
                Some(_) if says.iter().any(|name| !["enum", "const", "type"].contains(name)) => {
                    Err("restricts its strings by further keywords: this model writes strings without quotes, so \
                         only `enum`, `const` and `type` are supported"
                        .into())
                }
                Some(texts) if texts.iter().any(|text| text.contains(PARAMETER_END)) => {
                    Err(format!("has a string with `{PARAMETER_END}`, which ends a value in this model's calls"))
                }
                Some(texts) => Ok(Form::OneOf(texts)),
                None => Err("mixes strings with other values: this model writes strings without quotes".into()),
            };
        }
        if !may_be_text(schema) {
            return Ok(Form::Json);
        }
        let length = |name: &str| fields.get(name).and_then(Value::as_u64);
        let bounds = ["type", "minLength", "maxLength"];
        let alone = fields.get("type").is_none_or(|kind| kind == "string");
        let plain = |schema: &Value| {
            let known = |name: &String| name == "type" || NOTES.contains(&name.as_str());
            schema.as_object().is_some_and(|fields| fields.keys().all(known))
        };
        if says.iter().all(|name| *name == "type") || (alone && says.iter().all(|name| bounds.contains(name)))
        {
            return Ok(Form::Text { min: length("minLength").unwrap_or(0), max: length("maxLength") });
        }
        if let [only @ ("anyOf" | "oneOf")] = says.as_slice()
            && let Some(ways) = fields[*only].as_array()
            && ways.iter().all(plain)
        {
            return Ok(Form::Text { min: 0, max: None });
        }
        Err("is a string with bounds that cannot be enforced in the calls of this model, which writes strings \
             without quotes: use `minLength`, `maxLength` or `enum`"
            .into())
    }

    fn schema_at(&self, to: &str) -> Option<&Value> {
        let mut path = to.strip_prefix("#/")?.split('/');
        let first = self.root.get(path.next()?)?;
        path.try_fold(first, |value, name| value.get(name))
    }
}

/// The allowed values, if the schema lists them.
fn values(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, Some(values)) => values.as_array().cloned(),
        (None, None) => None,
    }
}

/// True if a value may be a string, as far as the schema's types say.
fn may_be_text(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => match schema.get("anyOf").or_else(|| schema.get("oneOf")).and_then(Value::as_array) {
            Some(ways) => ways.iter().any(may_be_text),
            None => true,
        },
    }
}
