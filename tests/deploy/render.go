// Renders a chart with Go's templates and sprig, as Helm does: chart, release and the cluster's API versions on the command line,
// the merged values and what the cluster has as JSON on standard input. It is not Helm: of what Helm adds to the two it knows what this chart uses.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

type files string

// The API versions that the cluster has.
type versions []string

func (all versions) Has(version string) bool {
	for _, one := range all {
		if one == version {
			return true
		}
	}
	return false
}

func (chart files) Get(name string) string {
	text, err := os.ReadFile(filepath.Join(string(chart), name))
	check(err)
	return string(text)
}

func main() {
	chart, release := os.Args[1], os.Args[2]
	var given struct {
		Values   map[string]any
		Existing []map[string]any
	}
	metadata := map[string]any{}
	check(json.NewDecoder(os.Stdin).Decode(&given))
	check(yaml.Unmarshal([]byte(files(chart).Get("Chart.yaml")), &metadata))
	title := map[string]any{}
	for key, value := range metadata {
		title[strings.ToUpper(key[:1])+key[1:]] = value
	}
	root := map[string]any{
		"Values": given.Values, "Chart": title, "Files": files(chart),
		"Capabilities": map[string]any{"APIVersions": versions(os.Args[3:])},
		"Release": map[string]any{"Name": release, "Namespace": "larder", "Service": "Helm"},
	}

	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	delete(functions, "env")
	delete(functions, "expandenv")
	functions["include"] = func(name string, data any) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["lookup"] = func(version, kind, namespace, name string) map[string]any {
		for _, one := range given.Existing {
			if one["kind"] == kind && one["metadata"].(map[string]any)["name"] == name {
				return one
			}
		}
		return map[string]any{}
	}
	functions["toYaml"] = func(value any) string {
		text, err := yaml.Marshal(value)
		check(err)
		return strings.TrimSuffix(string(text), "\n")
	}
	all.Funcs(functions)
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	for _, name := range names {
		text, err := os.ReadFile(name)
		check(err)
		template.Must(all.New(name).Parse(string(text)))
	}
	for _, name := range names {
		if strings.HasPrefix(filepath.Base(name), "_") {
			continue
		}
		var text strings.Builder
		check(all.ExecuteTemplate(&text, name, root))
		fmt.Printf("---\n%s\n", strings.ReplaceAll(text.String(), "<no value>", ""))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
