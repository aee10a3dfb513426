//! Finds the types of a tool's parameters in its schema, and reduces tools to what parsing calls needs.
//!
//! A schema may refer to itself and branch without bound, so the search is limited; beyond the limit a
//! parameter has no known type.
use super::{Tool, ToolFormat, tools_from_json};
use crate::grammar::InvalidParameter;
use serde_json::{Map, Value, json};

/// A set of JSON types, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

const NAMES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Limits: the depth of references and alternatives in the search for a type, the steps of that search for all
/// tools of a request, and the number of parameters that are not strings. Parameters beyond the first two
/// limits are read as strings.
const MAX_DEPTH: u32 = 16;
const MAX_STEPS: usize = 20_000;
const MAX_TYPED: usize = 2048;

/// Maximum length in bytes of a function's or parameter's name in a call. A longer text is not a name.
pub(super) const MAX_NAME: usize = 256;

impl Types {
    const NONE: Types = Types(0);
    const STRING: Types = Types(1 << 4);

    /// The types of a parameter; `None` if the schema does not say.
    pub fn of(tool: &Tool, key: &str) -> Option<Self> {
        let (root, mut steps) = (tool.schema(), MAX_STEPS);
        Self::of_schema(root.get("properties")?.get(key)?, root, MAX_DEPTH, &mut steps)
    }

    /// `None` if the schema does not say, or if `depth` or `steps` are used up.
    fn of_schema(schema: &Value, root: &Value, depth: u32, steps: &mut usize) -> Option<Self> {
        let depth = depth.checked_sub(1)?;
        *steps = steps.checked_sub(1)?;
        // The arguments themselves always are an object, even if the schema does not say so.
        if std::ptr::eq(schema, root) {
            return Some(Self::named("object"));
        }
        if let Some(kind) = schema.get("type") {
            let names = kind.as_array().map_or(std::slice::from_ref(kind), Vec::as_slice);
            return Some(names.iter().filter_map(Value::as_str).map(Self::named).fold(Self::NONE, Self::or));
        }
        if let Some(value) = schema.get("const") {
            return Some(Self::of_value(value));
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return Some(values.iter().map(Self::of_value).fold(Self::NONE, Self::or));
        }
        if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
            return Self::of_schema(root.pointer(to.strip_prefix('#')?)?, root, depth, steps);
        }
        if let Some(list) = schema.get("anyOf").or_else(|| schema.get("oneOf")) {
            let list = list.as_array().filter(|list| !list.is_empty())?;
            let all = |all: Self, one| Some(all.or(Self::of_schema(one, root, depth, steps)?));
            return list.iter().try_fold(Self::NONE, all);
        }
        let parts = schema.get("allOf")?.as_array()?;
        let known = parts.iter().filter_map(|part| Self::of_schema(part, root, depth, steps));
        known.reduce(|a, b| Types(a.0 & b.0))
    }

    fn of_value(value: &Value) -> Self {
        Self::named(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(n) if n.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        })
    }

    /// The empty set for an unknown name.
    fn named(name: &str) -> Self {
        NAMES.iter().position(|known| *known == name).map_or(Self::NONE, |at| Types(1 << at))
    }

    fn or(self, other: Self) -> Self {
        Types(self.0 | other.0)
    }

    pub fn has(self, name: &str) -> bool {
        self.0 & Self::named(name).0 != 0
    }

    /// True if all values are strings, or there is no known type.
    pub fn is_text(self) -> bool {
        self == Self::STRING || self == Self::NONE
    }
}

impl ToolFormat {
    /// Reduces the tools of a request to what is needed to parse calls. The result is kept as long as the
    /// request waits and runs, so it must be small: only Qwen3-Coder's format needs anything, namely the types
    /// of parameters that are not strings.
    pub(crate) fn tools_for_parsing(self, tools: &[Value]) -> Result<Vec<Tool>, InvalidParameter> {
        if self != ToolFormat::Qwen3Coder {
            return Ok(Vec::new());
        }
        let (mut steps, mut typed) = (MAX_STEPS, 0);
        let mut small = Vec::with_capacity(tools.len());
        for tool in tools {
            let function = &tool["function"];
            let root = &function["parameters"];
            let mut properties = Map::new();
            for (name, schema) in root["properties"].as_object().into_iter().flatten() {
                let types = Types::of_schema(schema, root, MAX_DEPTH, &mut steps);
                let Some(types) = types.filter(|types| !types.is_text() && name.len() <= MAX_NAME) else {
                    continue;
                };
                typed += 1;
                if typed > MAX_TYPED {
                    let what =
                        format!("has more than {MAX_TYPED} parameters that are not of the type `string`");
                    return Err(InvalidParameter::new("tools", what));
                }
                let names: Vec<&str> = NAMES.into_iter().filter(|name| types.has(name)).collect();
                properties.insert(name.clone(), json!({"type": names}));
            }
            let parameters = json!({"type": "object", "properties": properties});
            let function = json!({"name": function["name"], "parameters": parameters});
            small.push(json!({"type": "function", "function": function}));
        }
        tools_from_json(&small)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}})
    }

    /// Regression: all schemas were kept unchanged, at about 30 bytes per byte of JSON, even for formats that do
    /// not use them.
    #[test]
    fn only_what_reads_calls_back_is_kept_of_tools() {
        let described = [tool(json!({
            "properties": {
                "s": {"type": "string", "description": "long"}, "i": {"type": "integer"}, "o": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "one": {"oneOf": [{"const": 1}, {"enum": [true, "x"]}]},
                "open": {"anyOf": [{"type": "integer"}, {}]}, "any": {}, "none": {"anyOf": []},
                "ref": {"$ref": "#/$defs/n"}, "loop": {"$ref": "#/$defs/loop"}, "own": {"$ref": "#"},
                "both": {"allOf": [{"type": ["integer", "null"]}, {"type": "integer"}, {}]},
                "either": {"type": ["string", "null"]},
            },
            "$defs": {"n": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}},
        }))];
        let whole = tools_from_json(&described).unwrap();
        let format = ToolFormat::Qwen3Coder;
        let tools = format.tools_for_parsing(&described).unwrap();
        let names = described[0]["function"]["parameters"]["properties"].as_object().unwrap();
        for key in names.keys().map(String::as_str).chain(["unknown"]) {
            for value in ["3", "2.5", "null", "true", "{\"a\": 1}", "[1]", "text"] {
                let text = format!(
                    "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
                );
                let (said, calls) = format.parse(&text, &tools);
                assert_eq!(calls.len(), 1, "{text}");
                assert_eq!((said, calls), format.parse(&text, &whole), "{key}: {value}");
            }
        }
        let heavy = [tool(json!({"properties": {}, "x": vec![json!([]); 100_000]}))];
        assert_eq!(
            format.tools_for_parsing(&heavy),
            format.tools_for_parsing(&[tool(json!({"properties": {}}))])
        );
        assert_eq!(ToolFormat::Hermes.tools_for_parsing(&described).unwrap().len(), 0);
    }

    #[test]
    fn types_that_are_hard_to_find_come_to_an_end() {
        let many = vec![json!({"$ref": "#/$defs/a"}); 100];
        let endless =
            tool(json!({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": many}}}));
        assert_eq!(ToolFormat::Qwen3Coder.tools_for_parsing(&[endless]).unwrap().len(), 1);
        let typed = |n: usize| -> Map<String, Value> {
            (0..n).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect()
        };
        let read = |n| ToolFormat::Qwen3Coder.tools_for_parsing(&[tool(json!({"properties": typed(n)}))]);
        assert!(read(MAX_TYPED).is_ok());
        assert_eq!(read(MAX_TYPED + 1).unwrap_err().param, "tools");
    }
}
