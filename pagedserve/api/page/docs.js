// Shows /openapi.json.

const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = localStorage.getItem("pagedserve.theme") ?? (dark ? "dark" : "light");

function element(name, text = "", ...children) {
  const node = document.createElement(name);
  node.append(text, ...children);
  return node;
}

function typeOf(schema, schemas) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const fields = Object.keys(schemas[name].properties ?? {});
    return `{${fields.join(", ")}}`;
  }
  if (schema.anyOf) return [...new Set(schema.anyOf.map((one) => typeOf(one, schemas)))].filter((one) => one !== "null").join(" or ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items, schemas) : "any"}`;
  return schema.type ?? "any";
}

function row(name, type, note, required) {
  const line = element("tr", "", element("td", name), element("td", type), element("td", note));
  line.cells[0].classList.toggle("required", required);
  return line;
}

function curl(method, path, schema) {
  if (method === "get") return `curl ${location.origin}${path}`;
  const body = {};
  if (schema.properties.messages) body.messages = [{ role: "user", content: "Hello" }];
  else if (schema.properties.prompt) body.prompt = "Hello";
  else body.tokens = [1, 2];
  return `curl ${location.origin}${path} -H 'Content-Type: application/json' -d '${JSON.stringify(body)}'`;
}

const { paths, components } = await (await fetch("/openapi.json")).json();
for (const [path, methods] of Object.entries(paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const body = operation.requestBody?.content["application/json"].schema;
    const schema = body ? components.schemas[body.$ref.split("/").at(-1)] : { properties: {} };
    const section = element("section", "", element("h2", `${method.toUpperCase()} ${path}`), element("p", operation.description ?? operation.summary));
    const table = element("table");
    for (const parameter of operation.parameters ?? []) table.append(row(parameter.name, typeOf(parameter.schema, components.schemas), parameter.in, parameter.required));
    for (const [name, field] of Object.entries(schema.properties)) table.append(row(name, typeOf(field, components.schemas), field.description ?? "", schema.required?.includes(name) ?? false));
    section.append(table, element("pre", curl(method, path, schema)));
    document.getElementById("endpoints").append(section);
  }
}
